"""The desk of a stream: its rules with their alerts per minute, and buttons to pause, resume and change them."""

from __future__ import annotations

import datetime as dt
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import ipywidgets

from lookback.core.errors import SetupError
from lookback.core.values.texts import count_noun, summarize_error
from lookback.core.values.times import format_time
from lookback.desk import parts
from lookback.desk.running import Ticker
from lookback.desk.steering import SteeredRule, list_steered
from lookback.spark.operations.status import count_alerts_by_role
from lookback.verbs import describe_new_version
from lookback.views import pictures

if TYPE_CHECKING:
    from lookback.core.streams.declaration import Stream
    from lookback.spark.rules import RulesTable
    from lookback.spark.stream.pipeline import Evaluation

# The period over which alerts are counted.
MINUTES = 5.0
_REFRESH_SECONDS = 10.0
# After this long without a press the list no longer refreshes automatically.
_PATIENCE_SECONDS = 3_600.0
_LIST_ROWS = 14
# The desks that refresh automatically, by place and stream. When a cell runs again, its new desk replaces the old one.
_OPEN: dict[tuple[str, str], StreamDesk] = {}


class StreamDesk:
    """The desk of one stream. A notebook shows its `widget`.

    It refreshes every `seconds`; with 0 only the button does. Refreshing ends with Stop, when another desk of the
    stream opens, or after an hour without a press.
    """

    def __init__(self, rules: RulesTable, stream: Stream, seconds: float = _REFRESH_SECONDS) -> None:
        self._rules, self._stream = rules, stream
        self._evaluation: Evaluation | None = None
        self._listed: list[SteeredRule] = []
        self._lock, self._filling = threading.Lock(), parts.Filling()
        self._shown_parameters: object = None
        self._drawn = -1
        self._status = parts.Status()
        self._ticker: Ticker | None = None
        self._seconds = seconds
        self._add_widgets()
        self.refresh()
        if seconds:
            self._start_ticker()

    def attach(self, evaluation: Evaluation) -> None:
        """Plots the progress of a running evaluation until it ends. Stop ends it."""
        self._evaluation, self._drawn = evaluation, -1
        parts.describe(self._stop, "Stop the evaluation; the next one continues from there")
        self._picture.layout.display = ""
        self._status.show("The evaluation runs in the background; Stop ends it.", "done")
        if not self.is_refreshing:
            self._start_ticker()

    @property
    def status(self) -> str:
        """The sentence in the status line."""
        return self._status.text

    @property
    def rules(self) -> list[SteeredRule]:
        """The rules as of the last refresh."""
        return list(self._listed)

    @property
    def is_refreshing(self) -> bool:
        """Whether the list refreshes automatically."""
        return self._ticker is not None and self._ticker.is_running

    def _add_widgets(self) -> None:
        self._read_at = parts.make_text("", "lookback-read-at")
        hint = (
            "The rules of the stream: name, status, version, alerts a minute; the buttons below act on the chosen one"
        )
        self._list = parts.make_list(ipywidgets.Select, "Rules", hint, _LIST_ROWS, "lookback-rules")
        self._filling.observe(self._list, self._show_parameters)
        hint = "A parameter of the chosen rule"
        self._name = parts.make_field(ipywidgets.Dropdown, "Parameter", hint, "lookback-name", options=[])
        self._filling.observe(self._name, self._show_value)
        self._value = _make_text("Value", "Its new value, such as 1200 or 24 hours")
        self._author = _make_text("Author", "Who makes the change; empty: the user of the notebook")
        self._comment = _make_text("Comment", "Why; it stays with the version")
        self._picture = parts.make_picture(b"", "", "lookback-progress-picture")
        self._picture.layout.display = "none"
        pause = self._make_button("Pause", lambda: self._set_status("paused"), "Pause it; its windows keep filling")
        resume = self._make_button("Resume", lambda: self._set_status("active"), "Make the chosen rule active again")
        refresh = self._make_button("Refresh", self.refresh, "Reload rules and alerts")
        self._stop = self._make_button("Stop", self.stop, "Stop refreshing automatically")
        set_value = self._make_button("Set", self._set, "Publish the next version with this value")
        rows = (
            (pause, resume, refresh, self._stop),
            (self._name, self._value, set_value),
            (self._author, self._comment),
        )
        above = (parts.make_heading("Rules of the stream"), self._picture, self._read_at, self._list)
        self.widget = parts.make_desk(*above, *(parts.make_row(*row) for row in rows), self._status.widget)
        self.widget.add_class("lookback-streams")

    def _make_button(self, title: str, act: Callable[[], object], hint: str) -> Any:
        def press() -> None:
            if self._ticker is not None:
                self._ticker.touch()
            with self._status.catching():
                act()

        return parts.make_button(title, press, hint, f"lookback-{title.lower()}")

    # Reading
    # -----------------------------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Reloads the rules and their alerts. Does nothing while another thread does so."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            now = dt.datetime.now(dt.timezone.utc)
            tables, name = self._rules.tables, self._stream.name
            alerts = count_alerts_by_role(tables, name, now - dt.timedelta(minutes=MINUTES))
            self._listed = list_steered(self._rules.list_rows(), name, alerts, MINUTES)
            self._show(now)
        finally:
            self._lock.release()

    def _show(self, now: dt.datetime) -> None:
        chosen, lines = self._list.value, [(each.line, each.role) for each in self._listed]
        with self._filling:
            if list(self._list.options) != lines:
                self._list.options = lines
                roles = [each.role for each in self._listed]
                self._list.value = chosen if chosen in roles else next(iter(roles), None)
        self._show_parameters()
        total = sum(each.per_minute for each in self._listed)
        self._read_at.value = parts.clean_text(
            f"{self._stream.name}: {count_noun(len(self._listed), 'rule')}, {total:,.1f} alerts a minute over the last "
            f"{MINUTES:g} minutes, as of {format_time(now)}."
        )
        self._draw()

    def _draw(self) -> None:
        reports = [] if self._evaluation is None else list(self._evaluation.reports)
        if reports and reports[-1].batch_id != self._drawn:
            self._drawn = reports[-1].batch_id
            parts.show_figure(self._picture, pictures.plot_evaluation(reports))

    def _find_chosen(self) -> SteeredRule | None:
        return next((each for each in self._listed if each.role == self._list.value), None)

    def _show_parameters(self) -> None:
        """Shows the parameters of the chosen rule, and keeps a value that is being typed."""
        chosen = self._find_chosen()
        names = [] if chosen is None else [str(name) for name in chosen.parameters]
        shown = (None if chosen is None else chosen.role, names)
        if shown == self._shown_parameters:
            return
        self._shown_parameters = shown
        with self._filling:
            self._name.options, self._name.value = names, next(iter(names), None)
        self._show_value()

    def _show_value(self) -> None:
        chosen, name = self._find_chosen(), self._name.value
        value = None if chosen is None or name is None else chosen.parameters.get(name)
        self._value.value = parts.clean_text(str(value).lower() if isinstance(value, bool) else value)

    # Acting
    # ------------------------------------------------------------------------------------------------------------

    def _require_chosen(self) -> SteeredRule:
        chosen = self._find_chosen()
        if chosen is None:
            raise SetupError("no rule is chosen; publish one with 02_author_rules, or with `lookback rules push`")
        return chosen

    def _set_status(self, status: str) -> None:
        chosen = self._require_chosen()
        version = self._rules.set_status(chosen.rule_id, status, **self._name_author())
        self._finish(f"{chosen.rule_id} is published as version {version}, {status}.")

    def _set(self) -> None:
        chosen, name, value = self._require_chosen(), self._name.value, self._value.value
        if name is None:
            raise SetupError(f"{chosen.rule_id} has no parameters; write one under `parameters` in its document")
        version = self._rules.set_parameters(chosen.rule_id, {name: value}, **self._name_author())
        said = describe_new_version(self._rules, chosen.rule_id, version, f" with {name} = {value}")
        self._finish(f"{'; '.join(said)}.")

    def _name_author(self) -> dict[str, Any]:
        return {"author": self._author.value.strip(), "comment": self._comment.value.strip()}

    def _finish(self, sentence: str) -> None:
        self.refresh()
        self._status.show(sentence, "done")

    # Time
    # --------------------------------------------------------------------------------------------------------------

    def _start_ticker(self) -> None:
        key = (self._rules.tables.place, self._stream.name)
        before = _OPEN.get(key)
        if before is not None and before._ticker is not None:
            before._ticker.stop(wait=False)
        _OPEN[key] = self
        self._ticker = Ticker(self._tick, self._seconds or _REFRESH_SECONDS, _PATIENCE_SECONDS, self._show_rest).start()

    def _tick(self) -> None:
        if self._evaluation is None:
            self.refresh()
            return
        if self._ticker is not None:
            self._ticker.touch()  # the user of a running evaluation wants to see it
        has_ended = not self._evaluation.running
        self.refresh()
        if has_ended:
            self._end_evaluation()

    def _show_rest(self) -> None:
        self._status.show("Nothing was pressed for an hour, so the list no longer refreshes automatically.")

    def stop(self) -> None:
        """Stops the refreshing, and the evaluation if one is attached."""
        if self._ticker is not None:
            self._ticker.stop()
        if self._evaluation is None:
            self._status.show("The list no longer refreshes automatically; Refresh reloads it.", "done")
            return
        self._status.show("Stopping the evaluation after its current batch ...")
        self._end_evaluation()
        self.refresh()

    def _end_evaluation(self) -> None:
        """Stops the attached evaluation, and shows how it ended."""
        evaluation, self._evaluation = self._evaluation, None
        parts.describe(self._stop, "Stop refreshing automatically")
        if evaluation is None:
            return
        try:
            evaluation.stop()
        except Exception as error:  # noqa: BLE001 - whatever ended the evaluation is shown to the person who started it
            self._status.show(f"The evaluation failed: {summarize_error(error)}", "problem")
            return
        self._status.show("The evaluation has ended; the next one continues from there.", "done")


def _make_text(title: str, hint: str) -> Any:
    return parts.make_field(ipywidgets.Text, title, hint, f"lookback-{title.lower()}")

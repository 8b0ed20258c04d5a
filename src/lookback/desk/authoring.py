"""The desk of a rule's author: a form beside the YAML, checks while one types, trials, the gate, and a way to publish.

What it makes is the YAML file that git keeps. The form changes its text place by place (see `ruletext`); what the form has no
field for is written in the YAML itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ipywidgets

from lookback.config import read_text
from lookback.core.errors import LookbackError, SetupError
from lookback.core.rules.document import RULE_ID
from lookback.core.rules.gate import Condition, Gate, hash_document
from lookback.core.rules.variants import read_varied, suggest_values
from lookback.core.values.columns import to_text
from lookback.core.values.texts import count_noun
from lookback.core.values.times import parse_calendar_time
from lookback.data_remarks import find_data_remarks
from lookback.desk.checking import Checked, check_text
from lookback.desk.parts import (
    Status,
    TextTable,
    add_classes,
    clean_text,
    make_button,
    make_column,
    make_desk,
    make_field,
    make_heading,
    make_row,
    make_text,
)
from lookback.desk.ruleform import Place, RuleForm, make_area
from lookback.desk.ruletext import RuleText
from lookback.desk.running import Run
from lookback.desk.sliders import Sliders, draw
from lookback.desk.tuning import Tuning
from lookback.spark.activation import Activation, activate, check_document, find_candidate
from lookback.spark.lists import read_contents
from lookback.spark.replay.backtest import Candidate, Range, backtest
from lookback.spark.tables.history import read_recent_events
from lookback.testing.trial import Trial, run_trial
from lookback.views import pictures

if TYPE_CHECKING:
    from lookback.config import Settings
    from lookback.core.streams.declaration import Stream
    from lookback.spark.replay.comparison import Comparison
    from lookback.spark.rules import RulesTable

_NEW = "a new rule"
_HALF = {"width": "48%", "min_width": "360px"}
_MAX_UNDO = 200
_MAX_SHOWN_ALERTS = 10
_FIRST_TEXT = {
    "rule_id": "my-rule", "stream": "", "severity": "medium", "group_by": [], "window": "1 hour",
    "measures": {"n": "count(*)"}, "when": "n >= :limit", "parameters": {"limit": 3}, "message": "{n} events within an hour",
}  # fmt: skip


def begin_rule(stream: Stream) -> RuleText:
    """Writes the text of a new rule of a stream, for an author to change."""
    return RuleText.of({**_FIRST_TEXT, "stream": stream.name})


@dataclass
class _Look:
    """The result of a quick look at a rule."""

    rule_id: str
    trial: Trial
    stream: Stream
    remarks: Sequence[Any]


@dataclass
class _Tested:
    """The result of a backtest."""

    tuning: Tuning
    events: int
    comparisons: Sequence[Comparison] = field(default_factory=list)


class Authoring:
    """The desk of a rule's author. widget: what a notebook shows. text: the rule as it is written now.

    rules: the table of the rules. stream: that of a new rule. settings: where conf/ is, and its gate.
    """

    def __init__(self, rules: RulesTable, stream: Stream, settings: Settings, text: RuleText | None = None) -> None:
        self.text = text or begin_rule(stream)
        self.checked: Checked
        self.run: Run | None = None
        self._rules, self._settings, self._first_stream = rules, settings, stream
        self._file = Path(self.text.name) if Path(self.text.name).is_file() else None
        # The files that were read or written here, with what was in them.
        self._known = {} if self._file is None else {self._file: self.text.text}
        self._past: list[tuple[str, Path | None]] = []
        self._changed_by: object = None
        # Why the YAML cannot be read; what was typed there is not in `text` then.
        self._unread = ""
        self._status = Status()
        self._form = RuleForm(rules.streams, self._change)
        self._yaml = Place("yaml", make_area("YAML", "The rule as its file; what the form has no field for is written here", 28), self._read_yaml)  # fmt: skip
        self._words = make_text("", "lookback-words")
        self._findings = TextTable(("line", "place", "what to do"), "max-content max-content 1fr", "lookback-findings")
        self._work = _Work(self._status, self.cancel)
        self._add_widgets()
        self._show(None)

    @property
    def status(self) -> str:
        """The sentence in the line of the status."""
        return self._status.text

    def _add_widgets(self) -> None:
        self._files = make_field(ipywidgets.Dropdown, "Rule", "A file of conf/rules, or a new rule", "lookback-files", options=self._list_files())  # fmt: skip
        opened = make_button("Open", self._open, "Open the chosen file, or begin a new rule", "lookback-open")
        undo = make_button("Undo", self._undo, "Take back the last change of the rule", "lookback-undo")
        self.widget = add_classes(
            make_desk(
                make_row(self._files, opened, undo, name="lookback-open-row"),
                make_row(
                    add_classes(ipywidgets.VBox([self._form.widget], layout=_HALF), "lookback-form"),
                    add_classes(ipywidgets.VBox([self._yaml.widget], layout=_HALF), "lookback-yaml"),
                ),
                make_heading("Check"), self._words, self._findings.widget,
                make_heading("Try and publish"), make_row(self._work.cancel, self._status.widget, name="lookback-status-row"),
                self._make_look(), self._make_backtest(), self._make_gate(), self._make_publish(),
                self._look_result, self._sliders.widget,
            ),
            "lookback-authoring",
        )  # fmt: skip

    # The text ----------------------------------------------------------------------------------------------------------

    def _list_files(self) -> list[tuple[str, str]]:
        files = sorted((self._settings.conf / "rules").glob("*.y*ml"))
        return [(_NEW, ""), *((clean_text(file.name, 120), str(file)) for file in files)]

    def _open(self) -> None:
        chosen = self._files.value
        try:
            text = RuleText.read(chosen) if chosen else begin_rule(self._first_stream)
        except LookbackError as error:
            self._status.show(str(error), "problem")
            return
        self._accept(text, None, Path(chosen) if chosen else None)
        if self._file is not None:
            self._known[self._file] = text.text
        self._look_result.children = []
        self._conditions.show([])
        self._sliders.clear()
        what = f"{chosen} is open" if chosen else "A new rule is begun"
        self._status.show(f"{what}; Undo brings back what was here.", "done")

    def _undo(self) -> None:
        if self._unread:
            self._show(None)
            self._status.show("The YAML is as it was when it could be read.", "done")
            return
        if not self._past:
            self._status.show("There is nothing to take back.")
            return
        text, self._file = self._past.pop()
        self.text, self._changed_by = self._name(text), None
        self._show(None)
        self._status.show("The last change is taken back.", "done")

    def _name(self, text: str) -> RuleText:
        return RuleText(text) if self._file is None else RuleText(text, str(self._file))

    def _change(self, changed_by: Place | None, make: Callable[[RuleText], RuleText]) -> None:
        """Changes the text as the form says; a sentence at the field if that cannot be."""
        try:
            self._accept(make(self.text), changed_by, self._file)
        except SetupError as error:
            if changed_by is None:
                self._status.show(str(error), "problem")
            else:
                changed_by.tell([str(error)])

    def _read_yaml(self, place: Place) -> None:
        try:
            text = self._name(place.value)
        except SetupError as error:
            self._unread = str(error)
            place.tell([self._unread])
            self._form.disable()
            return
        self._accept(text, place, self._file)

    def _accept(self, text: RuleText, changed_by: Place | None, file: Path | None) -> None:
        if text.text != self.text.text:
            # Letters typed into one field are taken back together.
            if changed_by is None or changed_by is not self._changed_by:
                self._past = [*self._past[1 - _MAX_UNDO :], (self.text.text, self._file)]
            self.text = text
        self._changed_by, self._file = changed_by, file
        self._show(changed_by)

    def _show(self, changed_by: Place | None) -> None:
        """Shows the text in all fields but the one in which it was changed, and what a check says."""
        self._form.show(self.text, changed_by)
        if changed_by is not self._yaml:
            self._yaml.show(self.text.text)
        self._yaml.tell([])
        self._unread = ""
        self.checked = check_text(self.text, self._rules.streams)
        self._words.value = clean_text(self.checked.words)
        self._form.tell(self.checked.problems)
        found = [
            *self.checked.problems,
            *(replace(each, message=f"Remark: {each.message}") for each in self.checked.remarks),
        ]
        self._findings.show([(each.line, each.place or "the document", each.message) for each in found])

    def _require_fine(self) -> Mapping[str, Any]:
        """Returns the document. Raises SetupError if it cannot be published."""
        self._require_read()
        if not self.checked.is_fine:
            raise SetupError(f"{count_noun(len(self.checked.problems), 'problem')} to mend first, see Check")
        return self.text.document

    def _require_read(self) -> None:
        if self._unread:
            raise SetupError(f"the YAML cannot be read: {self._unread}")

    # Work --------------------------------------------------------------------------------------------------------------

    def _start(self, title: str, work: Callable[[Callable[[str], None]], Any], show: Callable[[Any], None]) -> None:
        """Starts work in a thread of its own; one at a time."""
        if self.run is not None and self.run.is_running:
            self._status.show("Something is still running; cancel it first.", "problem")
            return

        def finish(act: Callable[[], None]) -> None:
            try:
                act()
            finally:
                self._work.set_running(False)

        self._work.set_running(True)
        self._status.show(f"{title} ...")
        self.run = Run(
            self._rules.tables.spark, work,
            on_line=lambda line: self._status.show(f"{title}: {line}"),
            on_done=lambda result: finish(lambda: show(result)),
            on_failure=lambda sentence: finish(lambda: self._status.show(sentence, "problem")),
            on_cancelled=lambda: finish(lambda: self._status.show(f"{title} was cancelled; nothing is running.", "done")),
        ).start()  # fmt: skip

    def cancel(self) -> None:
        """Cancels what is running, if anything is."""
        if self.run is not None and self.run.is_running:
            self._status.show("Cancelling ...")
            self.run.cancel()

    def _make_look(self) -> Any:
        self._events = make_field(ipywidgets.BoundedIntText, "Newest events", "How many of the newest events to try the rule on", value=10_000, min=1, max=1_000_000)  # fmt: skip
        self._look_result = make_column(name="lookback-look-result")
        button = self._work.make_button("Quick look", self._look, "Run the rule over the newest events; nothing is written", "lookback-look")  # fmt: skip
        return make_row(button, self._events)

    def _look(self) -> None:
        document, events = dict(self._require_fine()), self._events.value
        stream, tables = self._rules.streams[str(document["stream"])], self._rules.tables

        def work(progress: Callable[[str], None]) -> _Look:
            progress(f"reading the newest {events:,} events")
            rule = self._rules.check(document)
            recent, lists = read_recent_events(tables, stream, events), read_contents(tables, rule.lists)
            progress(f"judging {len(recent):,} events")
            trial = run_trial(document, recent, stream, lists)
            return _Look(rule.spec.rule_id, trial, stream, find_data_remarks(rule, stream, recent, lists))

        self._start("Quick look", work, self._show_look)

    def _show_look(self, look: _Look) -> None:
        trial = look.trial
        title = f"{look.rule_id}: what it would have flagged"
        figure = pictures.plot_flagged(
            trial.events, trial.final_alerts, look.stream.event_time, title,
            values=trial.values, name=trial.name, limits=trial.limits,
        )  # fmt: skip
        table = TextTable(("event time", "severity", "key", "measures", "message"), name="lookback-look-alerts")
        table.show([_list_alert(row) for row in trial.alerts.tail(_MAX_SHOWN_ALERTS).iloc[::-1].to_dict("records")])
        notes = [make_text(f"Remark: {each}") for each in look.remarks]
        notes += [make_text(f"Problem: {row['message']}") for row in trial.errors.to_dict("records")]
        shown = [table.widget] if len(trial.alerts) else []
        self._look_result.children = [make_heading("Quick look"), draw(figure), *shown, *notes]
        judged = f"{count_noun(len(trial.events), 'event')} judged"
        self._status.show(f"{count_noun(len(trial.final_alerts), 'alert')} of {judged}; nothing was written.", "done")

    def _make_backtest(self) -> Any:
        make = partial(make_field, ipywidgets.Text)
        self._since = make("Since", "The event time from which on it speaks; empty: the first", "lookback-since")
        self._vary = make("What if", "Values to try, such as limit=500,1000,2000, several with semicolons; empty: the first number of the parameters", "lookback-vary")  # fmt: skip
        self._against = make("Against", "The id of a published rule to compare with; empty: none", "lookback-against")
        self._budget = make_field(ipywidgets.BoundedFloatText, "Budget", "The alerts that the team can look at in a day; 0: none is drawn", "lookback-budget", value=0, min=0, max=1e9)  # fmt: skip
        button = self._work.make_button("Backtest", self._backtest, "Judge all events of the stream; nothing is written", "lookback-backtest")  # fmt: skip
        self._sliders = Sliders(self._take_values)
        return make_column(
            make_row(self._vary, self._since, self._against, self._budget), button,
        )  # fmt: skip

    def _backtest(self) -> None:
        document, against = dict(self._require_fine()), self._against.value.strip()
        try:
            varied: dict[str, Any] = {**read_varied(part for part in self._vary.value.split(";") if part.strip())}
            since = self._since.value.strip()
            within = Range(parse_calendar_time(since) if since else None)
        except ValueError as error:
            raise SetupError(f"What if or Since: {error}") from None
        rules, stream = self._rules, self._rules.streams[str(document["stream"])]
        varied = varied or suggest_values(document)

        def work(progress: Callable[[str], None]) -> _Tested:
            candidate = Candidate(document, rules.next_version(str(document["rule_id"])))
            other = rules.find_version(against) if against else None
            compared = None if other is None else Candidate(dict(other.document or {}), other.version)
            with backtest(
                rules.tables, stream, [candidate], within, vary=varied, rows=False, against=compared,
                streams=rules.streams, progress=progress,
            ) as result:  # fmt: skip
                tuning = Tuning(result.figures, dict(document.get("parameters") or {}))
                return _Tested(tuning, result.events, result.comparisons)

        self._start("Backtest", work, self._show_backtest)

    def _show_backtest(self, tested: _Tested) -> None:
        self._sliders.show(tested.tuning, self._budget.value or None)
        beside = [f" Beside {each.rule_id} version {each.version}: {each.sentence}." for each in tested.comparisons[:1]]
        self._status.show(f"{tested.events:,} events judged; nothing was published.{''.join(beside)}", "done")

    def _take_values(self, chosen: Mapping[str, Any]) -> None:
        def put(text: RuleText) -> RuleText:
            for name, value in chosen.items():
                text = text.put(["parameters", name], value)
            return text

        self._change(None, put)
        self._status.show(f"The rule has {', '.join(f'{name} {value}' for name, value in chosen.items())} now.", "done")

    # The gate, saving and publishing -----------------------------------------------------------------------------------

    def _make_gate(self) -> Any:
        self._conditions = TextTable(("condition", "met", "figure", "what to do"), name="lookback-gate-table")
        check = self._work.make_button("Check the gate", self._check_gate, "What the settings ask of the rule before it is active", "lookback-gate")  # fmt: skip
        make_active = self._work.make_button("Activate", self._activate, "Make the published draft active, if it has all that the gate asks", "lookback-activate")  # fmt: skip
        return make_column(make_row(check, make_active), self._conditions.widget)

    def _check_gate(self) -> None:
        document, gate, author = dict(self._require_fine()), self._settings.gate, self._author.value.strip()
        if gate is None:
            self._status.show(
                "conf/settings.yml has no gate: a version is active as soon as it is published as active."
            )
            return
        self._start(
            "Gate",
            lambda progress: check_document(self._rules, document, gate, author=author, progress=progress),
            self._show_conditions,
        )

    def _show_conditions(self, conditions: Sequence[Condition]) -> None:
        rows = [(each.condition, "met" if each.met else "not met", each.figure, each.remedy) for each in conditions]
        self._conditions.show(rows)
        missing = sum(not each.met for each in conditions)
        self._status.show("The rule has all that the gate asks." if not missing else f"{count_noun(missing, 'condition')} of the gate not met.", "done")  # fmt: skip

    def _activate(self) -> None:
        document, gate = dict(self._require_fine()), self._settings.gate or Gate()
        approver, comment = self._author.value.strip(), self._comment.value.strip()

        def work(progress: Callable[[str], None]) -> Activation:
            there = find_candidate(self._rules, str(document["rule_id"]))
            if hash_document(there.document or {}) != hash_document(document):
                raise SetupError(
                    f"version {there.version} in the table has another document; publish this one first, then activate it"
                )
            return activate(self._rules, there.rule_id, gate, approver=approver, comment=comment, progress=progress)

        def show(found: Activation) -> None:
            self._show_conditions(found.conditions)
            done = "is not active: not all is met" if found.version is None else f"is active as version {found.version}"
            self._status.show(f"Version {found.candidate} {done}.", "done")

        self._start("Activate", work, show)

    def _make_publish(self) -> Any:
        text = partial(make_field, ipywidgets.Text)
        self._author = text("Author", "Who publishes or activates it; empty: who runs the notebook", "lookback-author")
        self._comment = text("Comment", "Why this version", "lookback-comment")
        statuses = ("active", "shadow", "paused", "draft")
        self._new_status = make_field(ipywidgets.Dropdown, "Status", "With which status to publish", "lookback-new-status", options=statuses)  # fmt: skip
        self._replaces = make_field(ipywidgets.Checkbox, "Replace a file that is there", "Whether to write over a file that was not opened here, or has changed since", "lookback-replace", value=False)  # fmt: skip
        save = make_button("Save as conf/rules/ID.yml", self._guard(self.save), "Write the YAML as the file that git keeps", "lookback-save")  # fmt: skip
        publish = self._work.make_button("Publish", self._publish, "Append the next version to the rules table; a stream that runs obeys it within seconds", "lookback-publish")  # fmt: skip
        return make_column(
            make_row(save, self._replaces),
            make_row(self._new_status, self._author, self._comment, publish),
        )  # fmt: skip

    def _guard(self, act: Callable[[], object]) -> Callable[[], None]:
        return lambda: _show_failure(self._status, act)

    def save(self) -> Path:
        """Writes the text as conf/rules/ID.yml, and returns the file. Raises SetupError.

        A file that is there is written over if it was opened here and has not changed since, or if the author says so.
        """
        self._require_read()
        rule_id = self.text.get("rule_id")
        if not (isinstance(rule_id, str) and RULE_ID.fullmatch(rule_id)):
            raise SetupError("the file is named by rule_id; write one first, such as large-payment")
        file = self._settings.conf / "rules" / f"{rule_id}.yml"
        self._require_own(file)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            # A file of its own first: one that is torn would be no rule.
            draft = file.with_suffix(".yml.new")
            with draft.open("w", encoding="utf-8", newline="") as opened:
                opened.write(self.text.text)
            draft.replace(file)
        except OSError as error:
            raise SetupError(
                f"{file} cannot be written: {error.strerror or error}; copy the YAML from above"
            ) from error
        self._file, self._known[file] = file, self.text.text
        self._replaces.value = False
        problems = "" if self.checked.is_fine else f", with {count_noun(len(self.checked.problems), 'problem')} to mend"
        self._files.options = self._list_files()
        self._files.value = str(file)
        self._status.show(f"{file} is written{problems}.", "done")
        return file

    def _require_own(self, file: Path) -> None:
        if not file.exists() or self._replaces.value:
            return
        known = next((text for each, text in self._known.items() if each.exists() and each.samefile(file)), None)
        if read_text(file) != known:
            why = "is there already" if known is None else "has changed since it was opened"
            raise SetupError(f"{file} {why}; tick `Replace a file that is there`, or choose another rule_id")

    def _publish(self) -> None:
        document, status = dict(self._require_fine()), self._new_status.value
        author, comment = self._author.value.strip(), self._comment.value.strip()

        def work(_: Callable[[str], None]) -> int:
            return self._rules.push(document, status=status, author=author, comment=comment)

        def show(version: int) -> None:
            chosen = self._rules.choose_status(status)
            then = "" if chosen == status else "; the settings have a gate: Activate makes it active"
            self._status.show(f"{document['rule_id']} is published as version {version}, {chosen}{then}.", "done")

        self._start("Publish", work, show)


class _Work:
    """The buttons that start work, which are off while something runs, and the one that cancels it, which is on then."""

    def __init__(self, status: Status, cancel: Callable[[], None]) -> None:
        self._status, self._buttons = status, list[Any]()
        self.cancel = make_button("Cancel", cancel, "Cancel what is running", "lookback-cancel")
        self.cancel.disabled = True

    def make_button(self, title: str, act: Callable[[], None], hint: str, name: str) -> Any:
        """Makes a button; an error of what it does is shown as a sentence."""
        button = make_button(title, lambda: _show_failure(self._status, act), hint, name)
        self._buttons.append(button)
        return button

    def set_running(self, is_running: bool) -> None:
        """Turns the buttons on or off."""
        for button in self._buttons:
            button.disabled = is_running
        self.cancel.disabled = not is_running


def _show_failure(status: Status, act: Callable[[], object]) -> None:
    """Does something, and shows an error that a person can mend as a sentence."""
    try:
        act()
    except LookbackError as error:
        status.show(str(error), "problem")


def _list_alert(row: Mapping[Any, Any]) -> list[str]:
    pairs = (
        ", ".join(f"{name} {to_text(value)}" for name, value in row[column].items()) for column in ("key", "measures")
    )
    return [to_text(row["event_time"].to_pydatetime()), row["severity"], *pairs, row["message"]]

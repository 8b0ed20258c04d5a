"""The desk for writing a rule: a form next to the YAML, checks as you type, trials, the gate, and publishing.

It produces the YAML file that you keep in git. The form changes the text place by place (see `RuleText`); parts without
a form field are written in the YAML itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ipywidgets

from lookback.config import read_text
from lookback.core.errors import SetupError
from lookback.core.rules.document import RULE_ID
from lookback.core.values.texts import count_noun
from lookback.desk import parts
from lookback.desk.rule.checking import Checked, check_text
from lookback.desk.rule.form import FormPlace, RuleForm, make_area
from lookback.desk.rule.publishing import PublishingPanel
from lookback.desk.rule.text import HEADER, RuleText
from lookback.desk.rule.trying import TryingPanel
from lookback.desk.work import Work

if TYPE_CHECKING:
    from lookback.config import Settings
    from lookback.core.streams.declaration import Stream
    from lookback.desk.running import RunningEvaluation
    from lookback.spark.rules import RulesTable

_NEW = "a new rule"
_MAX_UNDO = 200
_FIRST_TEXT = """\
rule_id: my-rule
parameters:
  limit: 3
severity: medium
group_by: []
window: 1 hour
measures:
  n: count(*)
when: "n >= :limit"
message: "{n} events within an hour"
"""


def begin_rule(stream: Stream) -> RuleText:
    """Returns the text of a new rule on a stream, for you to change."""
    return RuleText(HEADER + _FIRST_TEXT).put(["stream"], stream.name)


class Authoring:
    """The desk for writing a rule. A notebook shows its `widget`; `text` is the rule as written now.

    It takes the rules table, the stream of a new rule, and the settings with the configuration folder and the gate.
    """

    def __init__(self, rules: RulesTable, stream: Stream, settings: Settings, text: RuleText | None = None) -> None:
        self.text = text or begin_rule(stream)
        self.checked: Checked
        self._rules, self._settings, self._first_stream = rules, settings, stream
        self._file = Path(self.text.name) if Path(self.text.name).is_file() else None
        # The contents of the files that were read or written here.
        self._known = {} if self._file is None else {self._file: self.text.text}
        self._past: list[tuple[str, Path | None]] = []
        self._changed_by: object = None
        # Why the YAML cannot be read; `text` then lacks what was typed there.
        self._unread = ""
        self._work = Work(rules.tables.spark)
        self._trying = TryingPanel(rules, self._work, self._require_fine, self._take_values)
        self._publishing = PublishingPanel(rules, settings.gate, self._work, self._require_fine)
        self._form = RuleForm(rules.streams, self._change)
        area = make_area("YAML", "The rule as its file; write parts without a form field here", 32)
        self._yaml = FormPlace("yaml", area, self._read_yaml)
        self._words = parts.make_text("", "lookback-words")
        self._findings = parts.add_classes(ipywidgets.HTML(), "lookback-findings")
        self._add_widgets()
        self._choose_file()
        self._show(None)

    @property
    def status(self) -> str:
        """The sentence in the status line."""
        return self._work.status.text

    @property
    def run(self) -> RunningEvaluation | None:
        """The last piece of work that was started, if any."""
        return self._work.run

    def _add_widgets(self) -> None:
        hint = "A file of conf/rules, or a new rule"
        self._files = parts.make_field(ipywidgets.Dropdown, "Rule", hint, "lookback-files", options=self._list_files())
        hint = "Open the chosen file, or start a new rule"
        opened = self._work.make_button("Open", self._open, hint, "lookback-open")
        undo = parts.make_button("Undo", self._undo, "Undo the last change of the rule", "lookback-undo")
        form = parts.make_column(self._form.widget, name="lookback-form")
        check = parts.make_heading("Check"), self._words, self._findings
        text = parts.make_column(self._yaml.widget, *check, name="lookback-yaml")
        files = parts.make_row(self._files, opened, undo, name="lookback-open-row")
        status = parts.make_row(self._work.cancel_button, self._work.status.widget, name="lookback-status-row")
        trying = [parts.make_heading("Try and publish"), status, self._trying.controls, self._make_file_row()]
        desk = parts.make_desk(
            files, parts.make_halves(form, text), *trying, self._publishing.widget, self._trying.results
        )
        self.widget = parts.add_classes(desk, "lookback-authoring")

    # The text
    # ----------------------------------------------------------------------------------------------------------

    def _list_files(self) -> list[tuple[str, str]]:
        files = sorted((self._settings.conf / "rules").glob("*.y*ml"))
        return [(_NEW, ""), *((parts.clean_text(file.name, 120), str(file)) for file in files)]

    def _choose_file(self) -> None:
        """Selects the open file, if it is in conf/rules."""
        self._files.options = self._list_files()
        same = (value for _, value in self._files.options if value and self._file and Path(value).samefile(self._file))
        self._files.value = next(same, "")

    def _open(self) -> None:
        chosen = self._files.value
        text = RuleText.read(chosen) if chosen else begin_rule(self._first_stream)
        self._accept(text, None, Path(chosen) if chosen else None)
        if self._file is not None:
            self._known[self._file] = text.text
        self._trying.clear()
        self._publishing.clear()
        what = f"{chosen} is open" if chosen else "Started a new rule"
        self._work.status.show(f"{what}; Undo brings back the previous text.", "done")

    def _undo(self) -> None:
        if self._unread:
            self._show(None)
            self._work.status.show("The YAML is back at its last readable version.", "done")
            return
        if not self._past:
            self._work.status.show("Nothing to undo.")
            return
        text, self._file = self._past.pop()
        self.text, self._changed_by = self._name(text), None
        self._show(None)
        self._work.status.show("Undid the last change.", "done")

    def _name(self, text: str) -> RuleText:
        return RuleText(text) if self._file is None else RuleText(text, str(self._file))

    def _change(self, changed_by: FormPlace | None, make: Callable[[RuleText], RuleText]) -> None:
        """Changes the text as the form says, or shows at the field why that fails."""
        try:
            self._accept(make(self.text), changed_by, self._file)
        except SetupError as error:
            if changed_by is None:
                self._work.status.show(str(error), "problem")
            else:
                changed_by.tell([str(error)])

    def _read_yaml(self, place: FormPlace) -> None:
        try:
            text = self._name(place.control.value)
        except SetupError as error:
            self._unread = str(error)
            place.tell([self._unread])
            self._form.disable()
            return
        self._accept(text, place, self._file)

    def _accept(self, text: RuleText, changed_by: FormPlace | None, file: Path | None) -> None:
        if text.text != self.text.text:
            # One Undo reverts everything typed into one field.
            if changed_by is None or changed_by is not self._changed_by:
                self._past = [*self._past[1 - _MAX_UNDO :], (self.text.text, self._file)]
            self.text = text
        self._changed_by, self._file = changed_by, file
        self._show(changed_by)

    def _show(self, changed_by: FormPlace | None) -> None:
        """Shows the text in all fields except the one that changed it, and the result of a check."""
        self._form.show(self.text, changed_by)
        if changed_by is not self._yaml:
            self._yaml.show(self.text.text)
        self._yaml.tell([])
        self._unread = ""
        self.checked = check_text(self.text, self._rules.streams)
        self._words.value = parts.clean_text(self.checked.words)
        self._form.tell(self.checked.problems)
        remarks = [replace(each, message=f"Remark: {each.message}") for each in self.checked.remarks]
        found = [*self.checked.problems, *remarks]
        rows = [(each.line, each.place or "the document", each.message) for each in found]
        parts.show_rows(self._findings, ("line", "place", "what to do"), rows, "Problems and remarks")

    def _require_fine(self) -> Mapping[str, Any]:
        """Returns the document. Raises SetupError if it has problems."""
        self._require_read()
        if not self.checked.is_fine:
            raise SetupError(f"fix {count_noun(len(self.checked.problems), 'problem')} first, see Check")
        return self.text.document

    def _require_read(self) -> None:
        if self._unread:
            raise SetupError(f"the YAML cannot be read: {self._unread}")

    # The file
    # ----------------------------------------------------------------------------------------------------------

    def _make_file_row(self) -> Any:
        hint = "Whether to overwrite a file that was not opened here, or has changed since"
        kind, title = ipywidgets.Checkbox, "Replace an existing file"
        self._replaces = parts.make_field(kind, title, hint, "lookback-replace", value=False)
        hint = "Write the YAML to the file that you keep in git"
        saving = self._work.make_button("Save as conf/rules/ID.yml", self.save, hint, "lookback-save")
        return parts.make_row(saving, self._replaces)

    def save(self) -> Path:
        """Writes the text to conf/rules/ID.yml, and returns the file. Raises SetupError.

        It overwrites an existing file only if that was opened here and has not changed since, or if you allow it.
        """
        self._require_read()
        rule_id = self.text.get("rule_id")
        if not (isinstance(rule_id, str) and RULE_ID.fullmatch(rule_id)):
            raise SetupError("the file name comes from rule_id; write one first, such as large-payment")
        file = self._settings.conf / "rules" / f"{rule_id}.yml"
        self._require_own(file)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            # Written to a temporary file first, since a partial file would not be a valid rule.
            draft = file.with_suffix(".yml.new")
            with draft.open("w", encoding="utf-8", newline="") as opened:
                opened.write(self.text.text)
            draft.replace(file)
        except OSError as error:
            raise SetupError(f"cannot write {file}: {error.strerror or error}; copy the YAML from above") from error
        self._file, self._known[file] = file, self.text.text
        self._replaces.value = False
        problems = "" if self.checked.is_fine else f", with {count_noun(len(self.checked.problems), 'problem')} to fix"
        self._choose_file()
        self._work.status.show(f"Wrote {file}{problems}.", "done")
        return file

    def _require_own(self, file: Path) -> None:
        if not file.exists() or self._replaces.value:
            return
        known = next((text for each, text in self._known.items() if each.exists() and each.samefile(file)), None)
        if read_text(file) != known:
            why = "already exists" if known is None else "has changed since it was opened"
            raise SetupError(f"{file} {why}; tick `Replace an existing file`, or choose another rule_id")

    def _take_values(self, chosen: Mapping[str, Any]) -> None:
        def put(text: RuleText) -> RuleText:
            for name, value in chosen.items():
                text = text.put(["parameters", name], value)
            return text

        self._change(None, put)
        values = ", ".join(f"{name} {value}" for name, value in chosen.items())
        self._work.status.show(f"The rule now has {values}.", "done")

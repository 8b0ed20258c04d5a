"""The last steps of writing a rule: checking the gate, publishing, and activating."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import ipywidgets

from lookback.core.errors import SetupError
from lookback.core.rules.gate import Condition, Gate, hash_document
from lookback.core.values.texts import count_noun
from lookback.desk import parts
from lookback.spark.activation import Approval, activate, check_document, find_candidate
from lookback.verbs import NO_GATE, describe_published

if TYPE_CHECKING:
    from lookback.desk.work import Work
    from lookback.spark.rules import RulesTable

_STATUSES = ("active", "shadow", "paused", "draft")
_COLUMNS = ("condition", "met", "figure", "what to do")


class PublishingPanel:
    """The fields and buttons for the gate and for publishing, in `widget`.

    It takes the rules table, the gate of the settings (None for none), and `read_document`, which returns the rule to
    publish or raises SetupError.
    """

    def __init__(
        self, rules: RulesTable, gate: Gate | None, work: Work, read_document: Callable[[], Mapping[str, Any]]
    ) -> None:
        self._rules, self._gate, self._work, self._read_document = rules, gate, work, read_document
        text = partial(parts.make_field, ipywidgets.Text)
        self._author = text("Author", "Who publishes or activates it; empty: who runs the notebook", "lookback-author")
        self._comment = text("Comment", "Why this version", "lookback-comment")
        hint = "With which status to publish"
        self._status = parts.make_field(ipywidgets.Dropdown, "Status", hint, "lookback-new-status", options=_STATUSES)
        self._conditions = parts.add_classes(ipywidgets.HTML(), "lookback-gate-table")
        self.widget = parts.make_column(*self._make_rows(), self._conditions)
        self.clear()

    def clear(self) -> None:
        """Clears the conditions."""
        self._conditions.value = ""

    def _make_rows(self) -> tuple[Any, Any]:
        hint = "Append the next version to the rules table; a running stream applies it within seconds"
        publish = self._work.make_button("Publish", self._publish, hint, "lookback-publish")
        hint = "Check the conditions that the settings set for an active rule"
        check = self._work.make_button("Check the gate", self._check_gate, hint, "lookback-gate")
        hint = "Make the published draft active if it meets the gate"
        make_active = self._work.make_button("Activate", self._activate, hint, "lookback-activate")
        return parts.make_row(self._status, self._author, self._comment), parts.make_row(check, publish, make_active)

    def _name_author(self) -> tuple[str, str]:
        return self._author.value.strip(), self._comment.value.strip()

    def _check_gate(self) -> None:
        document, gate, author = dict(self._read_document()), self._gate, self._name_author()[0]
        if gate is None:
            self._work.status.show(NO_GATE)
            return
        self._work.start(
            "Gate",
            lambda progress: check_document(self._rules, document, gate, author=author, progress=progress),
            self._show_conditions,
        )

    def _show_conditions(self, conditions: Sequence[Condition]) -> None:
        rows = [(each.condition, "met" if each.met else "not met", each.figure, each.remedy) for each in conditions]
        parts.show_rows(self._conditions, _COLUMNS, rows, "The conditions of the gate")
        missing = sum(not each.met for each in conditions)
        self._work.status.show(
            "The rule meets the gate." if not missing else f"{count_noun(missing, 'condition')} of the gate not met.",
            "done",
        )

    def _activate(self) -> None:
        document, gate = dict(self._read_document()), self._gate or Gate()
        approver, comment = self._name_author()

        def work(progress: Callable[[str], None]) -> Approval:
            there = find_candidate(self._rules, str(document["rule_id"]))
            if hash_document(there.document or {}) != hash_document(document):
                raise SetupError(
                    f"version {there.version} in the table has another document; publish this one first, then activate it"
                )
            return activate(self._rules, there.rule_id, gate, approver=approver, comment=comment, progress=progress)

        def show(found: Approval) -> None:
            self._show_conditions(found.conditions)
            self._work.status.show(f"Version {found.candidate} {found.outcome}.", "done")

        self._work.start("Activate", work, show, is_lasting=True)

    def _publish(self) -> None:
        document, status = dict(self._read_document()), self._status.value
        author, comment = self._name_author()

        def work(_: Callable[[str], None]) -> int:
            return self._rules.push(document, status=status, author=author, comment=comment)

        def show(version: int) -> None:
            chosen = self._rules.choose_status(status)
            then = "" if chosen == status else "; the settings have a gate: Activate makes it active"
            self._work.status.show(describe_published(document["rule_id"], version, chosen, then), "done")

        self._work.start("Publish", work, show, is_lasting=True)

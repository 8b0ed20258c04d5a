"""The cells about rules: writing, checking, trying, publishing them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pandas as pd
import yaml

from lookback import verbs
from lookback.config import load_rule_document, parse_rule_text
from lookback.core.errors import Problem, RuleError, SetupError
from lookback.core.rules.compiled import CompiledRule
from lookback.core.rules.document import read_rule
from lookback.core.rules.gate import Condition, Gate, hash_document
from lookback.core.rules.parameters import read_parameter
from lookback.core.rules.remarks import find_remarks
from lookback.desk.rule.text import RuleText
from lookback.notebook.showing import say, show_desk, show_frame
from lookback.spark import activation, lists
from lookback.testing.trial import DocumentTrial
from lookback.verbs import Workspace
from lookback.views import pictures, whatif
from lookback.views.display import code, show, text

if TYPE_CHECKING:
    from lookback.desk.authoring import Authoring


# The parts of a rule that a job or CI may give as parameters of their own.
RULE_FIELDS = dict.fromkeys(
    (
        *("rule_id", "description", "severity", "group_by", "where", "window", "measures", "when", "parameters"),
        "message",
    ),
    "",
)


def rule_form(workspace: Workspace, form: SimpleNamespace, written: str = "") -> dict[str, Any]:
    """Reads the rule that is `written` as YAML, or `form.rule_file` if that is set, and shows it.

    A rule_file is looked up here, then in conf/rules. A field of `RULE_FIELDS` that `form` has replaces that part of the
    written rule: group_by has names separated by commas; measures (`name: aggregate`) and parameters (`name: value`) are
    separated by semicolons or lines. The rule is about the notebook's stream.
    """
    document = _read_rule_file(workspace, form.rule_file) or _make_document(workspace, form, written)
    return _show_document(document)


def open_rule(workspace: Workspace, rule: str) -> dict[str, Any]:
    """Reads a rule file, looked up here, then in conf/rules, or else the published rule with this id, and shows it.

    Raises SetupError if there is neither.
    """
    document = _read_rule_file(workspace, rule) if rule.endswith((".yml", ".yaml", ".json")) else None
    if document is None:
        published = {row.rule_id: row.document for row in workspace.rules.rows() if row.document}
        if rule not in published:
            raise SetupError(
                f"rule {rule!r} is neither a file in conf/rules nor a published rule; set rule to one of them"
            )
        document = dict(published[rule])
    return _show_document(document)


def _show_document(document: dict[str, Any]) -> dict[str, Any]:
    show(code(yaml.safe_dump(document, sort_keys=False, allow_unicode=True)))
    return document


def _read_rule_file(workspace: Workspace, name: str) -> dict[str, Any] | None:
    return load_rule_document(_find_rule_file(workspace, name)) if name else None


def _find_rule_file(workspace: Workspace, name: str) -> Path:
    here, there = Path(name), workspace.conf / "rules" / name
    return there if there.is_file() and not here.is_file() else here


def _make_document(workspace: Workspace, form: SimpleNamespace, written: str) -> dict[str, Any]:
    document = parse_rule_text(written, "the rule").document if written.strip() else {}
    given = {name: text for name in RULE_FIELDS if (text := getattr(form, name, ""))}
    made: dict[str, Any] = dict(given)
    if "group_by" in given:
        made["group_by"] = [name.strip() for name in given["group_by"].split(",") if name.strip()]
    if "measures" in given:
        made["measures"] = _parse_pairs(given["measures"])
    if "parameters" in given:
        made["parameters"] = {name: read_parameter(value) for name, value in _parse_pairs(given["parameters"]).items()}
    return {**document, "stream": workspace.stream.name, **made}


def _parse_pairs(listed: str) -> dict[str, str]:
    """Parses a list such as `total: sum(amount); n: count(*)` into texts by name."""
    parts = [part.partition(":") for part in listed.replace(";", "\n").splitlines() if part.strip()]
    return {name.strip(): text.strip() for name, _, text in parts}


def open_author_desk(
    workspace: Workspace, form: SimpleNamespace, document: Mapping[str, Any], wanted: bool = True
) -> Authoring | None:
    """Shows a desk for writing a rule: form, YAML, checks, trials, what-if, the gate, saving, publishing.

    It starts with the document, or with the text of `form.rule_file` if that is set. There is no desk unless it is
    wanted, see `show_desk`.
    """

    def read() -> RuleText:
        if form.rule_file:
            return RuleText.read(_find_rule_file(workspace, form.rule_file))
        return RuleText.of(document)

    place = workspace.rules, workspace.stream, workspace.settings
    return show_desk("authoring", lambda desk: desk.Authoring(*place, read()), wanted)


def check_rule(workspace: Workspace, document: Mapping[str, Any]) -> CompiledRule:
    """Checks a rule against its stream, runs its own tests, and describes it in words.

    Shows all problems as a table of places and remedies, and raises RuleError. Also shows remarks, which do not prevent
    publication.
    """
    try:
        rule = workspace.rules.check(document)
    except RuleError as error:
        show(pd.DataFrame([{"place": p.place or "the document", "what to do": p.message} for p in error.problems]))
        raise
    say(verbs.describe_checked(rule))
    _show_remarks(find_remarks(rule))
    return rule


def _show_remarks(remarks: Sequence[Problem]) -> None:
    """Shows the remarks, if any, as a table."""
    if remarks:
        show(pd.DataFrame([{"place": each.place or "the document", "remark": each.message} for each in remarks]))


def try_rule(workspace: Workspace, document: Mapping[str, Any], events: int = 50_000) -> DocumentTrial:
    """Runs a rule over the newest `events` events of its stream, and plots what it would have flagged.

    Nothing is published. The evaluator is the stream's own and takes the events in the order they were ingested. A
    window that begins before the first of these events is incomplete. Windows, sessions and waits that are still open
    at the last event have no result yet. The plot leaves out retracted alerts. Remarks name conditions that no event
    satisfies, such as a text that was never seen in its field.
    """
    stream = workspace.streams[str(document.get("stream"))]
    trial, remarks = verbs.try_rule(workspace.tables, document, stream, events)
    show(pictures.plot_trial(str(document.get("rule_id")), trial, stream.event_time))
    if len(trial.alerts):
        columns = ["window_start", "event_time", "severity", "key", "measures", "message", "verdict"]
        show(trial.alerts[columns].tail(10).iloc[::-1])
    if len(trial.errors):
        show(trial.errors)
    _show_remarks(remarks)
    return trial


def backtest_rule(
    workspace: Workspace,
    document: Mapping[str, Any],
    since: str = "",
    vary: str = "",
    budget: float = 0,
    against: str = "",
) -> pd.DataFrame:
    """Runs a rule over all events of its stream, and plots the alerts for other values of a parameter.

    Nothing is published.

    Args:
        workspace: Tables and streams.
        document: The rule.
        since: Event time from which alerts count; empty for the first event.
        vary: Values such as `limit=500,1000,2000`, several parameters separated by semicolons; empty for the first
            numeric parameter, from a quarter of its value to four times its value.
        budget: Alerts that a team can review in a day; 0 for no budget.
        against: Id of a rule whose active version to compare with.

    Returns:
        The figures, a row for each combination of values.

    Raises:
        SetupError: If a value is invalid.
        RuleError: If the rule is invalid.
    """
    try:
        varied, within = verbs.read_what_if(document, vary, since)
    except ValueError as error:
        raise SetupError(f"vary or since: {error}") from None
    with verbs.run_what_if(workspace.rules, document, varied, within, against) as result:
        frame = pd.DataFrame([{**vars(each), **each.parameters} for each in result.figures]).drop(columns="parameters")
        shown = [*varied, "alerts", "alerts_per_day", "keys", "flagged", "positives", "precision", "recall"]
        show(frame[shown])
        for name in list(varied)[:1]:
            today = (document.get("parameters") or {}).get(name)
            show(whatif.plot_alerts_by_value(result.figures, name, today=today, budget=budget or None))
            show(whatif.plot_precision_by_value(result.figures, name, today=today))
        show(*map(text, verbs.describe_comparisons(result, varied)))
    say(f"{document['rule_id']} over {result.events:,} events; nothing was published.")
    return frame


def edit_list(
    workspace: Workspace,
    name: str = "",
    add: str = "",
    remove: str = "",
    until: str = "",
    reason: str = "",
    kind: str = "",
    author: str = "",
) -> None:
    """Adds values to a list that rules look up with `in_list(field, 'name')`, removes values, and shows all lists.

    Args:
        workspace: Tables and streams.
        name: The list; empty to change nothing.
        add: Values to add, separated by commas.
        remove: Values to remove, separated by commas.
        until: When the added values expire: a time, or a duration such as `30 days`; empty for never.
        reason: Why the values are on the list.
        kind: cidr for ranges of addresses.
        author: Default: the user who runs the notebook.

    Raises:
        SetupError: If the list or a value is invalid.
    """
    if (add or remove) and not name:
        raise SetupError("list_add and list_remove need a list: set list_name too")
    added, removed = ([part.strip() for part in each.split(",") if part.strip()] for each in (add, remove))
    if removed:
        say(str(lists.remove_values(workspace.tables, name, removed)))
    if added:
        report = lists.add_values(
            workspace.tables,
            name,
            added,
            until=lists.read_until(until) if until else None,
            reason=reason or None,
            kind=kind or None,
            author=author or None,
        )
        say(str(report))
    show_frame(pd.DataFrame(lists.show_lists(workspace.tables)), "No lists yet.")


def publish_rule(
    workspace: Workspace,
    document: Mapping[str, Any],
    status: str = "active",
    publish: bool = True,
    author: str = "",
    comment: str = "",
) -> int | None:
    """Publishes the rule's next version with a status, if `publish` is true. A running stream applies it in seconds."""
    if not publish:
        say("Not published: set the parameter publish to true.")
        return None
    version = workspace.rules.push(document, status=status, author=author, comment=comment)
    say(verbs.describe_published(document["rule_id"], version, workspace.rules.choose_status(status)))
    return version


def check_gate(
    workspace: Workspace,
    document: Mapping[str, Any],
    activate: bool = False,
    author: str = "",
    comment: str = "",
) -> int | None:
    """Checks a rule against the gate of the settings. Shows each condition with its figure and remedy.

    Args:
        workspace: Tables and settings.
        document: The rule.
        activate: Whether to activate the published version with this document, if it meets all conditions; if not,
            nothing is written.
        author: Who approves it; empty for the user who runs the notebook.
        comment: Comment of the new version.

    Returns:
        The number of the new version; None if there is none.

    Raises:
        SetupError: If the published version has another document.
        RuleError: If the rule is invalid.
    """
    gate, rules, rule_id = workspace.settings.gate, workspace.rules, str(document["rule_id"])
    if gate is None:
        say(verbs.NO_GATE)
    if not activate:
        if gate is not None:
            _show_conditions(activation.check_document(rules, document, gate, author=author))
            say(f"Only checked {rule_id}; to activate it, set the parameter activate to true.")
        return None
    candidate = activation.find_candidate(rules, rule_id)
    if hash_document(candidate.document or {}) != hash_document(document):
        raise SetupError(
            f"version {candidate.version} of {rule_id} in the table has another document: set the parameters publish "
            "to true and status to draft, then activate it"
        )
    found = activation.activate(rules, rule_id, gate or Gate(), approver=author, comment=comment)
    _show_conditions(found.conditions)
    say(f"Version {found.candidate} of {rule_id} {found.outcome}.")
    return found.version


def _show_conditions(conditions: Sequence[Condition]) -> None:
    show(*([pd.DataFrame([vars(each) for each in conditions])] if conditions else []))


def list_rules(workspace: Workspace) -> pd.DataFrame:
    """Shows the last version of every rule."""
    rows = []
    for row in workspace.rules.rows():
        rule = read_rule(row.document)[0] if row.document else None
        described = {name: getattr(rule, name, "") for name in ("kind", "stream", "severity", "when")}
        published = {"rule_id": row.rule_id, "version": row.version, "status": row.status}
        rows.append({**published, **described, "author": row.author, "changed_at": row.changed_at})
    return show_frame(pd.DataFrame(rows), "No rule is published yet.")

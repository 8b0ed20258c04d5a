"""Commands on rules: publish, check, list, and commands for all rules of a stream."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from difflib import unified_diff
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import yaml

from lookback import verbs
from lookback.commands.options import (
    FOUND_PROBLEMS,
    WRONG_USE,
    CommandOptions,
    Commands,
    add_author,
    flag,
    option,
    print_lines,
    warn,
)
from lookback.config import load_rule_document
from lookback.core.errors import LookbackError, Problem, SetupError
from lookback.core.rules.descriptions import has_tag
from lookback.core.rules.document import read_rule
from lookback.core.rules.remarks import find_remarks
from lookback.core.rules.techniques import describe_coverage, find_coverage
from lookback.core.values.texts import count_noun, join_words
from lookback.views.terminal import describe_redundant, print_document, print_json, print_table

if TYPE_CHECKING:
    from lookback.core.rules.compiled import CompiledRule
    from lookback.core.streams.declaration import Stream
    from lookback.spark.rules import RulesTable
    from lookback.testing.rule_tests import CheckedFile

_Result = TypeVar("_Result")
_REPORT_OPTIONS = ("max_alerts_per_day", "since", "until")


def add_commands(commands: Commands) -> None:
    """Adds `rules` with its sub-commands, and `advance`."""
    _add_subcommands(commands.add_group("rules", "publish, check and list rules"))
    advance = commands.add("advance", _advance, "advance a stream's watermark while no events arrive", "stream")
    option(advance, "time", "the new watermark, such as 2026-01-31T12:00:00Z; UTC without a zone")


def _add_subcommands(commands: Commands) -> None:
    push = commands.add("push", _push_rules, "check rules and publish their next versions")
    option(push, "files", "files of rules, or folders of them", nargs="+")
    option(push, "--status", default="active", choices=["active", "draft", "shadow", "paused"])
    add_author(push)
    flag(push, "--cold", "do not fill its windows from history: they fill from now on")
    check = commands.add("check", _check_rules, "check rules and run their own tests; nothing is written")
    option(check, "files", "files of rules, or folders of them", nargs="+")
    text = "remark on conditions that no event satisfies, such as a text that was never seen in its field"
    flag(check, "--against-data", text)
    text = "how many of the newest events --against-data reads (50000)"
    option(check, "--events", text, "N", type=int, default=50_000)
    text = "try the rules on all events of their streams, and print a report in Markdown, for a pull request"
    flag(check, "--backtest", text)
    text = "with --backtest: a rule that raises more fails (default: the limit in the gate of the settings)"
    option(check, "--max-alerts-per-day", text, "N", type=float)
    option(check, "--since", "with --backtest: the event time from which alerts count", "TIME")
    option(check, "--until", "with --backtest: the event time before which alerts count", "TIME")
    text = "draft tests of a rule from the newest events of its stream: the fewest that alert, and a near miss"
    drafted = commands.add("draft-tests", _draft_tests, text, "file")
    option(drafted, "--events", "how many of the newest events to read (50000)", "N", type=int, default=50_000)
    listed = commands.add("list", _list_rules, "list the last version of every rule")
    option(listed, "--tag", "only rules with this tag, such as attack.t1110; capitals make no difference")
    text = "show which MITRE ATT&CK techniques and tactics have rules, by the tags of the rules"
    commands.add("coverage", _show_coverage, text)
    commands.add("show", _show_rule, "show a rule in words, its versions and its document", "rule_id")
    for name, status in (("pause", "paused"), ("resume", "active"), ("retire", "retired")):
        text = f"publish a version with status {status}"
        add_author(commands.add(name, _set_status, text, "rule_id", status=status))
    changed = commands.add("set", _set_parameters, "publish a version with other parameter values", "rule_id")
    option(changed, "values", "such as limit=1200", "NAME=VALUE", nargs="+", type=_read_pair)
    add_author(changed)
    text = "check a version against the gate of the settings, and publish it as active"
    activated = commands.add("activate", _activate, text, "rule_id")
    add_author(activated, "who approves it; default: the current user")
    text = "compare the alerts of a rule's version in shadow with the active one's"
    commands.add("compare", _compare_versions, text, "rule_id")
    differing = commands.add("diff", _diff_versions, "show the difference between two versions of a rule", "rule_id")
    option(differing, "before", metavar="V1", type=int)
    option(differing, "after", metavar="V2", type=int)
    text = "show which events rules flag together, and what each catches alone"
    shared = commands.add("overlap", _show_overlap, text)
    option(shared, "--since", "the event time from which events count (default: the first)", "TIME")
    option(shared, "--until", "the event time before which events count (default: no end)", "TIME")
    option(shared, "--as-of", "leave out later alerts and labels (default: now)", "TIME")
    option(shared, "--stream", "only rules of this stream (default: each stream separately)")
    text = "drop all window state of a stream; its rules continue with empty windows"
    commands.add("clear-state", _send_command, text, "stream", action="clear_state")
    commands.add("retire-all", _send_command, "retire all rules of a stream", "stream", action="retire_all")
    commands.add("schema", _print_schema, "print the JSON Schema of rule documents, for editors")
    option(commands.add("export", _export_rules, "print rules as YAML"), "rule_id", nargs="?")


def _show_overlap(options: CommandOptions) -> None:
    from lookback.spark.figures import Period, RuleFigures

    place = options.open_workspace()
    chosen = [place.stream] if options.stream else list(place.streams.values())
    since, until, as_of = map(options.read_moment, ("since", "until", "as_of"))
    period = Period(since, until, as_of)
    tables = place.tables
    for stream in chosen:
        if not (tables.exists(stream.name) and tables.exists("alerts") and tables.exists("rules")):
            continue
        figures = RuleFigures(tables, stream, period, streams=place.streams)
        if not figures.rules:
            continue
        pairs, alone = ([row.asDict() for row in rows.collect()] for rows in (figures.pairs(), figures.alone()))
        if options.wants_json:
            print_json([*pairs, *alone])
            continue
        for row in pairs:
            row["jaccard"] = "" if row["jaccard"] is None else f"{row['jaccard']:.3f}"
        print_table(pairs, ("a", "b", "both", "jaccard"))
        options.show_rows(alone, ("a", "alone", "flagged"), describe_redundant(alone))


def _read_rules(options: CommandOptions, read: Callable[[RulesTable], _Result]) -> _Result:
    """Reads from the rules table; see `Workspace.answer`."""
    place = options.open_workspace()
    return place.answer(lambda tables: read(place.find_rules(tables)))


def _list_files(options: CommandOptions) -> list[str]:
    """Returns the files that are given, and those in the folders that are given and below."""
    from lookback.importing.rulefiles import find_files

    files: list[str] = []
    for given in options.files:
        # A file that does not exist fails by itself, where it is read.
        files += [str(each.path) for each in find_files([given])] if Path(given).is_dir() else [given]
    return files


def _check_rules(options: CommandOptions) -> int:
    if options.backtest:
        return _report_rules(options)
    if given := [name for name in _REPORT_OPTIONS if getattr(options, name) is not None]:
        raise SetupError(f"--{given[0].replace('_', '-')} needs a backtest: add --backtest")
    events = options.events if options.against_data else None
    _, code = _check_files(options, options.open_workspace(), events)
    return code


def _check_files(
    options: CommandOptions, place: verbs.Workspace, events: int | None = None
) -> tuple[list[CompiledRule], int]:
    """Checks rules, beside the newest `events` events unless None, and prints what is found.

    Returns the valid rules, and the exit code: WRONG_USE if a file cannot be read, FOUND_PROBLEMS if a rule is invalid.
    """
    from lookback.testing.rule_tests import check_files

    rules: list[CompiledRule] = []
    files, code = _list_files(options), 0
    for checked in check_files(files, place.streams):
        rule, remarks = checked.rule, list[Problem]()
        if rule is not None:
            remarks = find_remarks(rule)
            if events is not None:
                stream = place.streams[rule.spec.stream]
                remarks += verbs.find_remarks_on_data(rule, stream, place.tables, events)
        (_print_findings_json if options.wants_json else _print_findings)(checked, remarks)
        if rule is not None and not checked.problems:
            rules.append(rule)
        else:
            code = max(code, FOUND_PROBLEMS if checked.name else WRONG_USE)
    if code and len(files) > 1:
        warn(f"{len(files) - len(rules):,} of {len(files):,} files have problems")
    return rules, code


def _report_rules(options: CommandOptions) -> int:
    from lookback.core.rules.gate import Gate
    from lookback.spark.replay.backtest import Range
    from lookback.spark.reports import report_rules
    from lookback.spark.rules import RulesTable
    from lookback.views.markdown import describe_range, format_reports

    place = options.open_workspace()
    gate, most, streams = place.settings.gate or Gate(), options.max_alerts_per_day, place.streams
    if most is not None and not 0 <= most < inf:
        raise SetupError(f"--max-alerts-per-day must be at least 0, got {most:g}")
    gate = gate if most is None else replace(gate, max_alerts_per_day=most)
    since, until = options.read_time("since"), options.read_time("until")
    within = None if since is None and until is None else Range(since, until)
    reports = report_rules(RulesTable(place.tables, streams), _list_files(options), gate, within)
    if options.wants_json:
        print_json(each.to_dict() for each in reports)
    else:
        print(format_reports(reports))
        if text := describe_range(reports):
            print(f"\n{text}")
    return 0 if all(each.passes for each in reports) else FOUND_PROBLEMS


def _print_findings(checked: CheckedFile, remarks: Sequence[Problem]) -> None:
    if not checked.name:
        _print_unreadable(checked)
    elif checked.rule is None or checked.problems:
        for line in (f"{checked.file}:", *(f"Rule {checked.name!r}: {problem}" for problem in checked.problems)):
            warn(line)
    else:
        print(f"{checked.file}: rule {checked.name!r} is valid ({count_noun(len(checked.rule.spec.tests), 'test')})")
        print_lines(*(f"remark: rule {checked.name!r}: {remark}" for remark in remarks))


def _print_findings_json(checked: CheckedFile, remarks: Sequence[Problem]) -> None:
    if not checked.name:
        _print_unreadable(checked)
        return
    found = [("problem", each) for each in checked.problems] + [("remark", each) for each in remarks]
    rows: list[dict[str, Any]] = [
        {"level": level, "place": each.place, "message": each.message} for level, each in found
    ]
    if not rows and checked.rule is not None:
        rows = [{"level": "fine", "tests": len(checked.rule.spec.tests)}]
    print_json({"file": checked.file, "rule_id": checked.name, **row} for row in rows)


def _print_unreadable(checked: CheckedFile) -> None:
    """Prints why a file cannot be read; the message begins with the file."""
    for problem in checked.problems:
        warn(str(problem))


def _push_rules(options: CommandOptions) -> int:
    from lookback.spark.newwindows import NewWindows

    place = options.open_workspace()
    # The check needs no Spark, so it runs before anything is published.
    checked, code = _check_files(options, place)
    if code:
        return code
    rules = place.rules
    if options.cold:
        checked = [rules.check({**rule.spec.document, "warm_start": False}) for rule in checked]
    windows = NewWindows(rules)
    for rule in checked:
        name = rule.spec.rule_id
        if cold := windows.find_cold_measures(rule):
            verb, text = "starts" if len(cold) == 1 else "start", windows.describe_history(rule)
            empty = f"{join_words(cold)} {verb} empty, since no rule keeps the rows yet"
            warn(f"warning: {name}: {empty}; {text}")
        if young := windows.describe_young_stream(rule):
            warn(f"warning: {name}: {young}")
    status = rules.choose_status(options.status)
    published = rules.push_checked(checked, status=status, author=options.author, comment=options.comment)
    for rule_id, version in published:
        if options.wants_json:
            print_json([{"rule_id": rule_id, "version": version, "status": status}])
        else:
            print_lines(*verbs.describe_new_version(rules, rule_id, version, status=status))
    if status in ("active", "shadow") and not options.wants_json:
        print_lines(*filter(None, [windows.describe_past({rule.spec.stream for rule in checked})]))
    return 0


def _draft_tests(options: CommandOptions) -> None:
    from lookback.testing.rule_tests import check_rule

    document = load_rule_document(options.file)
    place = options.open_workspace()
    stream = place.streams[check_rule(document, place.streams).spec.stream]
    tests = verbs.draft_rule_tests(place.tables, document, stream, options.events)
    if options.wants_json:
        print_json(tests)
        return
    print_document(yaml.safe_dump({"tests": tests}, sort_keys=False, allow_unicode=True))


def _activate(options: CommandOptions) -> int:
    from lookback.core.rules.gate import Gate
    from lookback.spark.activation import activate

    place = options.open_workspace()
    found = activate(
        place.rules, options.rule_id, place.settings.gate or Gate(), approver=options.author, comment=options.comment
    )
    rows = [asdict(each) for each in found.conditions]
    what = f"version {found.candidate} of {options.rule_id}"
    if options.wants_json:
        own = {"rule_id": options.rule_id, "candidate": found.candidate, "version": found.version}
        rows = [{**own, **row} for row in rows]
    done = (
        f"{what} {found.outcome}" if found.version is None else f"published {what} as version {found.version} (active)"
    )
    # A table cuts long texts, and a remedy must be read to its end.
    remedies = [f"not met: {each.condition}: {each.remedy}" for each in found.conditions if not each.met]
    options.show_rows(rows, ("condition", "figure", "met"), *remedies, done)
    return FOUND_PROBLEMS if found.version is None else 0


def _set_status(options: CommandOptions) -> None:
    rules = options.open_workspace().rules
    version = rules.set_status(options.rule_id, options.status, author=options.author, comment=options.comment)
    print_lines(*verbs.describe_new_version(rules, options.rule_id, version))


def _read_pair(text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not sign or not name:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE, such as limit=1200")
    return name, value


def _set_parameters(options: CommandOptions) -> None:
    rules, values = options.open_workspace().rules, dict(options.values)
    version = rules.set_parameters(options.rule_id, values, author=options.author, comment=options.comment)
    pairs = ", ".join(f"{name} = {value}" for name, value in options.values)
    print_lines(*verbs.describe_new_version(rules, options.rule_id, version, f" with {pairs}"))


def _compare_versions(options: CommandOptions) -> None:
    from lookback.spark.challenger import compare_versions

    table = options.open_workspace().rules
    found = compare_versions(table.tables, table.streams, options.rule_id, has_gate=table.has_gate)
    rows = [row.asDict() for row in found.count().collect()]
    if options.wants_json:
        rows = [{"rule_id": found.rule_id, "active": found.active, "shadow": found.shadow, **row} for row in rows]
    active = "no active version" if found.active is None else f"version {found.active}"
    since = "from the first commit" if found.since is None else f"after commit {found.since}"
    line = f"{found.rule_id}: version {found.shadow} in shadow against {active}, {since}"
    options.show_rows(rows, ("side", "alerts", "keys", "positives", "negatives", "unlabelled"), line)


def _diff_versions(options: CommandOptions) -> None:
    from lookback.core.rules.wording import list_changes

    versions = options.before, options.after
    before, after = _read_rules(
        options, lambda rules: [rules.find_document(options.rule_id, each) for each in versions]
    )
    changes = list_changes(before, after)
    if options.wants_json:
        print_json(asdict(change) for change in changes)
        return
    print_lines(*changes)
    old, new = (yaml.safe_dump(each, sort_keys=False, allow_unicode=True).splitlines() for each in (before, after))
    names = [f"{options.rule_id} version {each}" for each in (options.before, options.after)]
    lines = unified_diff(old, new, names[0], names[1], lineterm="")
    print("\n".join(lines) if changes else "the documents are equal")


def _list_rules(options: CommandOptions) -> None:
    found = _read_rules(options, lambda rules: rules.list_rows())
    rows = [asdict(row) for row in found if options.tag is None or has_tag(row.document, options.tag)]
    for row in rows if not options.wants_json else ():
        document = row["document"] or {}
        row.update(stream=document.get("stream"), when=read_rule(document)[0].when)
    options.show_rows(rows, ("rule_id", "version", "status", "stream", "when", "author", "changed_at"))


def _show_coverage(options: CommandOptions) -> None:
    found = find_coverage(_read_rules(options, lambda rules: rules.list_rows()))
    rows = [asdict(row) for row in found]
    options.show_rows(rows, ("technique", "rule_id", "version", "status"), describe_coverage(found))


def _show_rule(options: CommandOptions) -> None:
    from lookback.core.rules.compiling import compile_rule
    from lookback.core.rules.wording import describe_rule

    def read(rules: RulesTable) -> tuple[list[dict[str, Any]], list[dict[str, Any]], Mapping[str, Stream]]:
        # Raises for an unknown rule.
        documents = rules.export(options.rule_id)
        return [asdict(row) for row in rules.read_versions(options.rule_id)], documents, rules.streams

    rows, documents, streams = _read_rules(options, read)
    rows.sort(key=lambda row: row["version"])
    if options.wants_json:
        print_json(rows)
        return
    for document in documents:
        # A row written by hand may not be a valid rule; its document is shown unchanged.
        with suppress(LookbackError, KeyError):
            print_lines(describe_rule(compile_rule(document, streams[document["stream"]])))
    print_table(rows, ("version", "status", "author", "changed_at", "comment"))
    print_document(yaml.safe_dump_all(documents, sort_keys=False, allow_unicode=True))


def _export_rules(options: CommandOptions) -> None:
    documents = _read_rules(options, lambda rules: rules.export(options.rule_id))
    print_document(yaml.safe_dump_all(documents, sort_keys=False, allow_unicode=True))


def _send_command(options: CommandOptions) -> None:
    options.open_workspace().rules.command(options.action, options.stream)
    print(f"published {options.action} for {options.stream}")


def _print_schema(options: CommandOptions) -> None:
    from lookback.core.rules.schema import format_rule_schema

    print_document(format_rule_schema())


def _advance(options: CommandOptions) -> None:
    options.open_workspace().rules.command("advance", options.stream, time=options.time)
    print(f"published advance of {options.stream} to {options.time}")

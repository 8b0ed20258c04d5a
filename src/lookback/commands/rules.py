"""Commands on rules: publish, check, list, and commands for all rules of a stream."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from difflib import unified_diff
from math import inf
from typing import TYPE_CHECKING, Any, TypeVar

import yaml

from lookback.commands.options import (
    FOUND_PROBLEMS,
    AddCommand,
    answer,
    load_settings,
    make_adder,
    open_tables,
    read_time,
    wants_json,
)
from lookback.config import load_rule_document
from lookback.core.errors import LookbackError, RuleError, SetupError
from lookback.core.rules.document import read_rule
from lookback.core.values.texts import count_noun, escape_unprintable, join_words
from lookback.core.values.times import to_utc
from lookback.views.terminal import describe_redundant, print_document, print_json, print_table

if TYPE_CHECKING:
    from lookback.config import Settings
    from lookback.core.errors import Problem
    from lookback.core.rules.compiled import CompiledRule
    from lookback.core.rules.remarks import Remark
    from lookback.core.streams.declaration import Stream
    from lookback.spark.rules import RulesTable
    from lookback.spark.tables.lakehouse import Tables


_Result = TypeVar("_Result")
_REPORT_OPTIONS = ("max_alerts_per_day", "since", "until")


def add_commands(command: AddCommand, places: argparse.ArgumentParser) -> None:
    """Adds `rules` with its sub-commands, and `advance`. `places` has the options of all commands."""
    parser = command("rules", _list_rules, "publish, check and list rules")
    _add_subcommands(make_adder(parser.add_subparsers(title="commands", required=True, metavar="COMMAND"), places))
    advance = command("advance", _advance, "advance a stream's watermark while no events arrive")
    advance.add_argument("stream")
    advance.add_argument("time", help="the new watermark, such as 2026-01-31T12:00:00Z; UTC without a zone")


def _add_subcommands(command: AddCommand) -> None:
    push = command("push", _push_rules, "check rules and publish their next versions")
    push.add_argument("files", nargs="+")
    push.add_argument("--status", default="active", choices=["active", "draft", "shadow", "paused"])
    push.add_argument("--author", default="")
    push.add_argument("--comment", default="")
    push.add_argument("--cold", action="store_true", help="do not fill its windows from history: they fill from now on")
    check = command("check", _check_rules, "check rules and run their own tests; nothing is written")
    check.add_argument("files", nargs="+")
    check.add_argument(
        "--against-data", action="store_true",
        help="remark on conditions that no event satisfies, such as a text that was never seen in its field",
    )  # fmt: skip
    check.add_argument(
        "--events",
        type=int,
        default=50_000,
        metavar="N",
        help="how many of the newest events --against-data reads (50000)",
    )
    _add_report_options(check)
    command("list", _list_rules, "list the last version of every rule")
    shown = command("show", _show_rule, "show a rule in words, its versions and its document")
    shown.add_argument("rule_id")
    for name, status in (("pause", "paused"), ("resume", "active"), ("retire", "retired")):
        sub = command(name, _set_status, f"publish a version with status {status}")
        sub.add_argument("rule_id")
        sub.add_argument("--author", default="")
        sub.add_argument("--comment", default="")
        sub.set_defaults(status=status)
    changed = command("set", _set_parameters, "publish a version with other parameter values")
    changed.add_argument("rule_id")
    changed.add_argument("values", nargs="+", type=_read_pair, metavar="NAME=VALUE", help="such as limit=1200")
    changed.add_argument("--author", default="")
    changed.add_argument("--comment", default="")
    activated = command(
        "activate", _activate, "check a version against the gate of the settings, and publish it as active"
    )
    activated.add_argument("rule_id")
    activated.add_argument("--author", default="", help="who approves it; default: the current user")
    activated.add_argument("--comment", default="")
    compared = command(
        "compare", _compare_versions, "compare the alerts of a rule's version in shadow with the active one's"
    )
    compared.add_argument("rule_id")
    differing = command("diff", _diff_versions, "show the difference between two versions of a rule")
    differing.add_argument("rule_id")
    differing.add_argument("before", type=int, metavar="V1")
    differing.add_argument("after", type=int, metavar="V2")
    shared = command("overlap", _show_overlap, "show which events rules flag together, and what each catches alone")
    shared.add_argument("--since", metavar="TIME", help="the event time from which events count (default: the first)")
    shared.add_argument("--until", metavar="TIME", help="the event time before which events count (default: no end)")
    shared.add_argument("--as-of", metavar="TIME", help="leave out later alerts and labels (default: now)")
    shared.add_argument("--stream", help="only rules of this stream (default: each stream separately)")
    for name, text in (
        ("clear-state", "drop all window state of a stream; its rules continue with empty windows"),
        ("retire-all", "retire all rules of a stream"),
    ):
        sub = command(name, _send_command, text)
        sub.add_argument("stream")
        sub.set_defaults(action=name.replace("-", "_"))
    command("schema", _print_schema, "print the JSON Schema of rule documents, for editors")
    export = command("export", _export_rules, "print rules as YAML")
    export.add_argument("rule_id", nargs="?")


def _add_report_options(check: Any) -> None:
    check.add_argument(
        "--backtest", action="store_true",
        help="try the rules on all events of their streams, and print a report in Markdown, for a pull request",
    )  # fmt: skip
    check.add_argument(
        "--max-alerts-per-day", type=float, metavar="N",
        help="with --backtest: a rule that raises more fails (default: the limit in the gate of the settings)",
    )  # fmt: skip
    check.add_argument("--since", metavar="TIME", help="with --backtest: the event time from which alerts count")
    check.add_argument("--until", metavar="TIME", help="with --backtest: the event time before which alerts count")


def _show_overlap(options: argparse.Namespace) -> None:
    from lookback.spark.figures import Period, RuleFigures

    settings = load_settings(options)
    streams = settings.streams()
    chosen = [settings.stream(options.stream)] if options.stream else list(streams.values())
    tables = open_tables(settings, *streams.values())
    since, until, as_of = (
        None if time is None else to_utc(time)
        for time in (read_time(options, name) for name in ("since", "until", "as_of"))
    )
    period = Period(since, until, as_of)
    for stream in chosen:
        if not (tables.exists(stream.name) and tables.exists("alerts") and tables.exists("rules")):
            continue
        figures = RuleFigures(tables, stream, period, streams=streams)
        if not figures.rules:
            continue
        pairs, alone = ([row.asDict() for row in rows.collect()] for rows in (figures.pairs(), figures.alone()))
        if wants_json(options):
            print_json([*pairs, *alone])
            continue
        print_table([{**row, "jaccard": _format_share(row["jaccard"])} for row in pairs], ("a", "b", "both", "jaccard"))
        print_table(alone, ("a", "alone", "flagged"))
        print(escape_unprintable(describe_redundant(alone)))


def _format_share(share: float | None) -> str:
    return "" if share is None else f"{share:.3f}"


def _open_rules_table(options: argparse.Namespace) -> RulesTable:
    settings = load_settings(options)
    return _make_rules_table(open_tables(settings), settings)


def _make_rules_table(tables: Tables, settings: Settings) -> RulesTable:
    from lookback.spark.rules import RulesTable

    streams = settings.streams()
    if tables.root is None:
        tables.require_table("rules")
    elif not tables.exists("rules"):
        for stream in [stream for stream in streams.values() if not stream.table] or streams.values():
            tables.create(stream)
    return RulesTable(tables, streams, settings.gate is not None)


def _read_rules(options: argparse.Namespace, read: Callable[[RulesTable], _Result]) -> _Result:
    """Reads from the rules table; see `answer`."""
    settings = load_settings(options)
    return answer(settings, lambda tables: read(_make_rules_table(tables, settings)))


def _check_rules(options: argparse.Namespace) -> int:
    # `push` also checks, but has none of these options.
    if getattr(options, "backtest", False):
        return _report_rules(options)
    if given := [name for name in _REPORT_OPTIONS if getattr(options, name, None) is not None]:
        raise SetupError(f"--{given[0].replace('_', '-')} needs a backtest: add --backtest")
    settings = load_settings(options)
    streams, tables, events = settings.streams(), None, 0
    if getattr(options, "against_data", False):
        tables, events = open_tables(settings, *streams.values()), options.events
    checked = [_check_file(file, streams, tables, events) for file in options.files]
    for each in checked:
        (_print_findings_json if wants_json(options) else _print_findings)(each)
    return FOUND_PROBLEMS if any(each.problems for each in checked) else 0


def _report_rules(options: argparse.Namespace) -> int:
    from lookback.core.rules.gate import Gate
    from lookback.spark.replay.backtest import Range
    from lookback.spark.reports import report_rules
    from lookback.spark.rules import RulesTable
    from lookback.views.markdown import describe_range, format_reports

    settings = load_settings(options)
    gate, most, streams = settings.gate or Gate(), options.max_alerts_per_day, settings.streams()
    if most is not None and not 0 <= most < inf:
        raise SetupError(f"--max-alerts-per-day must be at least 0, got {most:g}")
    gate = gate if most is None else replace(gate, max_alerts_per_day=most)
    since, until = read_time(options, "since"), read_time(options, "until")
    within = None if since is None and until is None else Range(since, until)
    rules = RulesTable(open_tables(settings, *streams.values()), streams)
    reports = report_rules(rules, options.files, gate, within)
    if wants_json(options):
        print_json(each.to_dict() for each in reports)
    else:
        print(format_reports(reports))
        if text := describe_range(reports):
            print(f"\n{text}")
    return 0 if all(each.passes for each in reports) else FOUND_PROBLEMS


@dataclass(frozen=True)
class _CheckedFile:
    """A rule's file with its document, its problems or remarks, and the number of its own tests."""

    file: str
    document: Mapping[str, Any]
    problems: Sequence[Problem] = ()
    remarks: Sequence[Remark] = ()
    tests: int = 0
    name: str = ""


def _check_file(file: str, streams: Mapping[str, Stream], tables: Tables | None, events: int) -> _CheckedFile:
    from lookback.core.rules.remarks import find_remarks
    from lookback.testing.rule_tests import check_rule

    document = load_rule_document(file)
    try:
        rule = check_rule(document, streams)
    except RuleError as error:
        return _CheckedFile(file, document, error.problems, name=error.name)
    remarks = find_remarks(rule)
    if tables is not None:
        remarks += _check_against_data(rule, streams[rule.spec.stream], tables, events)
    return _CheckedFile(file, document, (), remarks, len(rule.spec.tests), rule.spec.rule_id)


def _check_against_data(rule: CompiledRule, stream: Stream, tables: Tables, events: int) -> list[Remark]:
    from lookback.core.rules.memberships import find_unknown_lists
    from lookback.core.rules.remarks import Remark
    from lookback.data_remarks import find_data_remarks
    from lookback.spark.following.listfeed import read_contents
    from lookback.spark.lists import list_names
    from lookback.spark.tables.history import read_recent_events

    unknown = find_unknown_lists(rule, list_names(tables)) if rule.lists else []
    remarks = [Remark(problem.place, problem.message) for problem in unknown]
    recent = read_recent_events(tables, stream, events) if tables.exists(stream.name) else ()
    if not len(recent):
        missing = f"{stream.name!r} has no events to check the rule against; ingest some first"
        return [*remarks, Remark("stream", missing)]
    return [*remarks, *find_data_remarks(rule, stream, recent, read_contents(tables, rule.lists))]


def _print_findings(checked: _CheckedFile) -> None:
    if checked.problems:
        lines = [f"Rule {checked.name!r}: {problem}" for problem in checked.problems]
        print("\n".join([f"{checked.file}:", *lines]), file=sys.stderr)
        return
    print(f"{checked.file}: rule {checked.name!r} is valid ({count_noun(checked.tests, 'test')})")
    for remark in checked.remarks:
        print(escape_unprintable(f"remark: rule {checked.name!r}: {remark}"))


def _print_findings_json(checked: _CheckedFile) -> None:
    rule = {"file": checked.file, "rule_id": str(checked.document.get("rule_id"))}
    found = [("problem", each) for each in checked.problems] + [("remark", each) for each in checked.remarks]
    rows: list[dict[str, Any]] = [
        {"level": level, "place": each.place, "message": each.message} for level, each in found
    ]
    print_json({**rule, **row} for row in rows or [{"level": "fine", "tests": checked.tests}])


def _push_rules(options: argparse.Namespace) -> int:
    # The check needs no Spark, so it runs before anything is published.
    if _check_rules(options):
        return FOUND_PROBLEMS
    rules = _open_rules_table(options)
    for document in map(load_rule_document, options.files):
        if options.cold:
            document["warm_start"] = False
        if cold := rules.cold_measures(document):
            verb, text = "starts" if len(cold) == 1 else "start", rules.describe_history(document)
            print(
                f"warning: {document['rule_id']}: {join_words(cold)} {verb} empty, since no rule keeps the rows yet; {text}",
                file=sys.stderr,
            )
        version = rules.push(document, status=options.status, author=options.author, comment=options.comment)
        status = rules.choose_status(options.status)
        print(f"published {document['rule_id']} version {version} ({status})")
        if status != options.status:
            print(f"the settings have a gate: lookback rules activate {document['rule_id']}")
    return 0


def _activate(options: argparse.Namespace) -> int:
    from lookback.core.rules.gate import Gate
    from lookback.spark.activation import activate

    gate, rules = load_settings(options).gate or Gate(), _open_rules_table(options)
    found = activate(rules, options.rule_id, gate, approver=options.author, comment=options.comment)
    rows = [asdict(each) for each in found.conditions]
    if wants_json(options):
        print_json(
            {"rule_id": options.rule_id, "candidate": found.candidate, "version": found.version, **row} for row in rows
        )
    else:
        print_table(rows, ("condition", "figure", "met", "remedy"))
        what = f"version {found.candidate} of {options.rule_id}"
        print(
            f"{what} is not active: not all conditions are met"
            if found.version is None
            else f"published {what} as version {found.version} (active)"
        )
    return FOUND_PROBLEMS if found.version is None else 0


def _set_status(options: argparse.Namespace) -> None:
    version = _open_rules_table(options).set_status(
        options.rule_id, options.status, author=options.author, comment=options.comment
    )
    print(f"published {options.rule_id} version {version} ({options.status})")


def _read_pair(text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not sign or not name:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE, such as limit=1200")
    return name, value


def _set_parameters(options: argparse.Namespace) -> None:
    rules = _open_rules_table(options)
    version = rules.set_parameters(
        options.rule_id, dict(options.values), author=options.author, comment=options.comment
    )
    pairs = ", ".join(f"{name} = {value}" for name, value in options.values)
    print(f"published {options.rule_id} version {version} with {pairs}")


def _compare_versions(options: argparse.Namespace) -> None:
    from lookback.spark.challenger import compare_versions

    table = _open_rules_table(options)
    found = compare_versions(table.tables, table.streams, options.rule_id, has_gate=table.has_gate)
    rows = [row.asDict() for row in found.count().collect()]
    if wants_json(options):
        print_json({"rule_id": found.rule_id, "active": found.active, "shadow": found.shadow, **row} for row in rows)
        return
    print_table(rows, ("side", "alerts", "keys", "positives", "negatives", "unlabelled"))
    active = "no active version" if found.active is None else f"version {found.active}"
    since = "from the first commit" if found.since is None else f"after commit {found.since}"
    print(f"{found.rule_id}: version {found.shadow} in shadow against {active}, {since}")


def _diff_versions(options: argparse.Namespace) -> None:
    from lookback.core.rules.wording import list_changes

    versions = options.before, options.after
    before, after = _read_rules(
        options, lambda rules: [rules.find_document(options.rule_id, each) for each in versions]
    )
    changes = list_changes(before, after)
    if wants_json(options):
        print_json(asdict(change) for change in changes)
        return
    for change in changes:
        print(escape_unprintable(str(change)))
    old, new = (yaml.safe_dump(each, sort_keys=False, allow_unicode=True).splitlines() for each in (before, after))
    names = [f"{options.rule_id} version {each}" for each in (options.before, options.after)]
    lines = unified_diff(old, new, names[0], names[1], lineterm="")
    print("\n".join(lines) if changes else "the documents are equal")


def _list_rules(options: argparse.Namespace) -> None:
    rows = [asdict(row) for row in _read_rules(options, lambda rules: rules.list_rows())]
    if wants_json(options):
        print_json(rows)
        return
    for row in rows:
        document = row["document"] or {}
        row.update(stream=document.get("stream"), when=read_rule(document)[0].when)
    print_table(rows, ("rule_id", "version", "status", "stream", "when", "author", "changed_at"))


def _show_rule(options: argparse.Namespace) -> None:
    from lookback.core.rules.compiled import compile_rule
    from lookback.core.rules.wording import describe_rule

    def read(rules: RulesTable) -> tuple[list[dict[str, Any]], list[dict[str, Any]], Mapping[str, Stream]]:
        # Raises for an unknown rule.
        documents = rules.export(options.rule_id)
        return [asdict(row) for row in rules.read_versions(options.rule_id)], documents, rules.streams

    rows, documents, streams = _read_rules(options, read)
    rows.sort(key=lambda row: row["version"])
    if wants_json(options):
        print_json(rows)
        return
    for document in documents:
        # A row written by hand may not be a valid rule; its document is shown unchanged.
        with suppress(LookbackError, KeyError):
            print(escape_unprintable(describe_rule(compile_rule(document, streams[document["stream"]]))))
    print_table(rows, ("version", "status", "author", "changed_at", "comment"))
    print_document(yaml.safe_dump_all(documents, sort_keys=False, allow_unicode=True))


def _export_rules(options: argparse.Namespace) -> None:
    documents = _read_rules(options, lambda rules: rules.export(options.rule_id))
    print_document(yaml.safe_dump_all(documents, sort_keys=False, allow_unicode=True))


def _send_command(options: argparse.Namespace) -> None:
    _open_rules_table(options).command(options.action, options.stream)
    print(f"published {options.action} for {options.stream}")


def _print_schema(options: argparse.Namespace) -> None:
    from lookback.core.rules.schema import format_rule_schema

    print_document(format_rule_schema())


def _advance(options: argparse.Namespace) -> None:
    _open_rules_table(options).command("advance", options.stream, time=options.time)
    print(f"published advance of {options.stream} to {options.time}")

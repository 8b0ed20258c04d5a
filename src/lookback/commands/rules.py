"""Commands on rules: publish, check, list, and what is told to all rules of a stream."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import yaml

from lookback.commands.asked import FOUND_PROBLEMS, Command, adding, settings_of, tables_of, wants_json
from lookback.config import load_rule_document
from lookback.core.errors import RuleError
from lookback.core.rules.remarks import Remark, find_remarks
from lookback.data_remarks import find_data_remarks
from lookback.testing.rule_tests import check_rule
from lookback.views.terminal import print_json, print_table, visible

if TYPE_CHECKING:
    from lookback.core.errors import Problem
    from lookback.core.rules.compiled import CompiledRule
    from lookback.core.streams.declaration import Stream
    from lookback.spark.rules import RulesTable
    from lookback.spark.tables.lakehouse import Tables


def add_commands(command: Command, places: argparse.ArgumentParser) -> None:
    """Adds `rules` with its sub-commands, and what moves time on for all rules. places: the options that all commands have."""
    parser = command("rules", _rules_list, "publish, check and list rules")
    _add_verbs(adding(parser.add_subparsers(title="commands", required=True, metavar="COMMAND"), places))
    advance = command("advance", _advance, "move a stream's watermark on where no events come")
    advance.add_argument("stream")
    advance.add_argument("time", help="the time that it is to reach, such as 2026-01-31T12:00:00Z; UTC without a zone")


def _add_verbs(command: Command) -> None:
    push = command("push", _rules_push, "check rules and publish their next versions")
    push.add_argument("files", nargs="+")
    push.add_argument("--status", default="active", choices=["active", "draft", "shadow", "paused"])
    push.add_argument("--author", default="")
    push.add_argument("--comment", default="")
    check = command("check", _rules_check, "check rules and run their own tests; nothing is written")
    check.add_argument("files", nargs="+")
    check.add_argument(
        "--against-data", action="store_true",
        help="remark on what none of the stream's events bears out, such as a text that was never seen in its field",
    )  # fmt: skip
    check.add_argument(
        "--events",
        type=int,
        default=50_000,
        metavar="N",
        help="how many of the newest events --against-data reads (50000)",
    )
    command("list", _rules_list, "the last version of every rule")
    for name, status in (("pause", "paused"), ("resume", "active"), ("retire", "retired")):
        sub = command(name, _rules_status, f"publish a version with status {status}")
        sub.add_argument("rule_id")
        sub.add_argument("--author", default="")
        sub.add_argument("--comment", default="")
        sub.set_defaults(status=status)
    for name, text in (
        ("clear-state", "forget all window state of a stream; its rules go on with empty windows"),
        ("retire-all", "retire all rules of a stream"),
    ):
        sub = command(name, _rules_command, text)
        sub.add_argument("stream")
        sub.set_defaults(action=name.replace("-", "_"))
    command("schema", _rules_schema, "print the JSON Schema of rule documents, for editors")
    export = command("export", _rules_export, "print rules as YAML")
    export.add_argument("rule_id", nargs="?")


def _rules_table(options: argparse.Namespace) -> RulesTable:
    from lookback.spark.rules import RulesTable

    settings = settings_of(options)
    streams = settings.streams()
    tables = tables_of(settings)
    if tables.root is None:
        tables.require_table("rules")
    elif not tables.exists("rules"):
        for stream in [stream for stream in streams.values() if not stream.table] or streams.values():
            tables.create(stream)
    return RulesTable(tables, streams)


def _documents(options: argparse.Namespace) -> list[tuple[str, dict[str, Any]]]:
    return [(file, load_rule_document(file)) for file in options.files]


def _rules_check(options: argparse.Namespace) -> int:
    settings = settings_of(options)
    streams, tables = settings.streams(), None
    if getattr(options, "against_data", False):
        tables = tables_of(settings, *streams.values())
    findings = [_findings(document, streams, tables, options) for _, document in _documents(options)]
    for file, (document, found, tests) in zip(options.files, findings, strict=True):
        if wants_json(options):
            rule_id = str(document.get("rule_id"))
            listed: list[dict[str, Any]] = [
                {name: each[name] for name in ("level", "place", "message")} for each in found
            ]
            print_json(
                {"file": file, "rule_id": rule_id, **each} for each in listed or [{"level": "fine", "tests": tests}]
            )
        else:
            _print_findings(file, document, found, tests)
    return FOUND_PROBLEMS if any(each["level"] == "problem" for _, found, _ in findings for each in found) else 0


def _findings(
    document: dict[str, Any], streams: Mapping[str, Stream], tables: Tables | None, options: argparse.Namespace
) -> tuple[dict[str, Any], list[dict[str, str]], int]:
    """A rule's document, its problems or else its remarks (level, place, message, text), and how many tests it has."""
    try:
        rule = check_rule(document, streams)
    except RuleError as error:
        return document, [_finding("problem", each, f"Rule {error.name!r}: {each}") for each in error.problems], 0
    remarks = find_remarks(rule)
    if tables is not None:
        stream = streams[rule.spec.stream]
        remarks += _against_data(rule, stream, tables, options.events)
    found = [_finding("remark", each, f"remark: rule {rule.spec.rule_id!r}: {each}") for each in remarks]
    return document, found, len(rule.spec.tests)


def _finding(level: str, found: Problem | Remark, text: str) -> dict[str, str]:
    return {"level": level, "place": found.place, "message": found.message, "text": text}


def _against_data(rule: CompiledRule, stream: Stream, tables: Tables, events: int) -> list[Remark]:
    from lookback.spark.tables.history import read_recent_events

    recent = read_recent_events(tables, stream, events) if tables.exists(stream.name) else ()
    if not len(recent):
        return [Remark("stream", f"{stream.name!r} has no events to check the rule against; ingest some first")]
    return find_data_remarks(rule, stream, recent)


def _print_findings(file: str, document: dict[str, Any], found: list[dict[str, str]], tests: int) -> None:
    texts = [each["text"] for each in found]
    if any(each["level"] == "problem" for each in found):
        print("\n".join([f"{file}:", *texts]), file=sys.stderr)
        return
    print(f"{file}: rule {document['rule_id']!r} is fine ({tests} {'test' if tests == 1 else 'tests'} of its own)")
    for text in texts:
        print(visible(text))


def _rules_push(options: argparse.Namespace) -> int:
    # What can be found wrong without Spark is found before it starts, and before anything is published.
    if _rules_check(options):
        return FOUND_PROBLEMS
    rules = _rules_table(options)
    for _, document in _documents(options):
        if cold := rules.cold_measures(document):
            names = " and ".join([", ".join(cold[:-1]), cold[-1]] if len(cold) > 1 else cold)
            text = "no rule keeps the rows yet; window_complete is false until the longest window has filled"
            begins = "starts" if len(cold) == 1 else "start"
            print(f"warning: {document['rule_id']}: {names} {begins} empty, since {text}", file=sys.stderr)
        version = rules.push(document, status=options.status, author=options.author, comment=options.comment)
        print(f"published {document['rule_id']} version {version} ({options.status})")
    return 0


def _rules_status(options: argparse.Namespace) -> None:
    version = _rules_table(options).set_status(
        options.rule_id, options.status, author=options.author, comment=options.comment
    )
    print(f"published {options.rule_id} version {version} ({options.status})")


def _rules_list(options: argparse.Namespace) -> None:
    rows = [asdict(row) for row in _rules_table(options).rows()]
    if wants_json(options):
        print_json(rows)
        return
    for row in rows:
        document = row["document"] or {}
        row.update(stream=document.get("stream"), when=document.get("when"))
    print_table(rows, ("rule_id", "version", "status", "stream", "when", "author", "changed_at"))


def _rules_export(options: argparse.Namespace) -> None:
    documents = _rules_table(options).export(options.rule_id)
    print(yaml.safe_dump_all(documents, sort_keys=False, allow_unicode=True), end="")


def _rules_command(options: argparse.Namespace) -> None:
    _rules_table(options).command(options.action, options.stream)
    print(f"published {options.action} for {options.stream}")


def _rules_schema(options: argparse.Namespace) -> None:
    from lookback.core.rules.schema import format_rule_schema

    print(format_rule_schema(), end="")


def _advance(options: argparse.Namespace) -> None:
    _rules_table(options).command("advance", options.stream, time=options.time)
    print(f"published advance of {options.stream} to {options.time}")

"""The commands that take over rules of other systems: `import sigma`, `import elastic`, ..."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Sequence, Set
from pathlib import Path
from typing import TYPE_CHECKING

from lookback.commands.options import FOUND_PROBLEMS, CommandOptions, Commands, flag, option, print_lines
from lookback.core.errors import SetupError
from lookback.core.streams.declaration import Stream
from lookback.core.values.texts import escape_unprintable
from lookback.importing.report import Report
from lookback.views.terminal import print_json

if TYPE_CHECKING:
    from lookback.importing.detections import Detection, Unread
    from lookback.importing.mapping import NameMap
    from lookback.importing.rulefiles import RuleFile

    _Read = Callable[[list[RuleFile], NameMap, Stream | None], list[Detection | Unread]]

_NEEDS_PYSIGMA = (
    "lookback import sigma needs pySigma 2, which needs Python 3.11 or newer: pip install 'lookback-rules[sigma]'"
)


def add_commands(commands: Commands) -> None:
    """Adds `import` with a sub-command for each format."""
    group = commands.add_group("import", "take over rules of other systems, and say how faithful each is")
    sigma = group.add("sigma", _import_sigma, "write Sigma rules as rules of a stream; nothing is published")
    _add_options(sigma)
    option(sigma, "--pipeline", "YAML file: a processing pipeline of pySigma, for names of fields", "FILE")
    elastic = group.add("elastic", _import_elastic, "write Elastic's detection rules as rules of a stream")
    _add_options(elastic)
    _add_moment(elastic, "event: judge at each event; schedule: count in windows, as often as the rule runs")
    panther = group.add("panther", _import_panther, "write Panther's correlations as rules of a stream of its signals")
    _add_options(panther)
    _add_moment(panther, "event: judge at each signal; schedule: in windows, as often as Panther does")
    option(panther, "--skeletons", "folder to write a rule without a condition to for each detection in Python", "DIR")
    _add_options(group.add("flink", _import_flink, "write rules of Flink's fraud detection demo as rules of a stream"))
    _add_options(group.add("aws", _import_aws, "write rules of AWS's dynamic rules engine as rules of a stream"))


def _add_options(command: argparse.ArgumentParser) -> None:
    """Adds the options of all formats."""
    option(command, "files", "files of rules, or folders of them", "FILES", nargs="+")
    option(command, "--stream", "the stream that the rules judge", "STREAM", required=True)
    option(command, "--map", "YAML file: what the fields and sources of the rules are in the stream", "FILE")
    option(command, "--out", "folder to write rules to (CONF/rules)", "DIR")
    option(command, "--lists", "folder to write a CSV file for each list to that rules ask (CONF/lists)", "DIR")
    option(command, "--draft-stream", "declare the stream in this new file, with all fields that rules read", "FILE")
    option(command, "--report", "file to write the report to; without it all lines are printed", "FILE")
    flag(command, "--strict", "end with 1 also if a rule is only approximated")


def _add_moment(command: argparse.ArgumentParser, text: str) -> None:
    option(command, "--as", text, choices=("event", "schedule"), default="event", dest="moment")


def _import_sigma(options: CommandOptions) -> int:
    try:
        # What pySigma has from version 2 on.
        importlib.import_module("sigma.policy")
        from lookback.importing.sigma import load_pipeline, read_rules
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "sigma":
            raise
        raise SetupError(_NEEDS_PYSIGMA) from error
    from lookback.importing.rulefiles import YAML_SUFFIXES

    pipeline = load_pipeline(options.pipeline)
    return _import(options, lambda files, names, _: read_rules(files, names, pipeline), YAML_SUFFIXES)


def _import_panther(options: CommandOptions) -> int:
    from lookback.importing.panther import read_rules
    from lookback.importing.rulefiles import YAML_SUFFIXES

    def read(files: list[RuleFile], *_: object) -> list[Detection | Unread]:
        return read_rules(files, is_scheduled=options.moment == "schedule")

    return _import(options, read, YAML_SUFFIXES, skeletons=options.skeletons)


def _import_flink(options: CommandOptions) -> int:
    from lookback.importing.flink import read_rules
    from lookback.importing.jsonrules import SUFFIXES

    return _import(options, lambda files, *_: read_rules(files), SUFFIXES)


def _import_aws(options: CommandOptions) -> int:
    from lookback.importing.aws import read_rules
    from lookback.importing.jsonrules import SUFFIXES

    return _import(options, lambda files, *_: read_rules(files), SUFFIXES)


def _import_elastic(options: CommandOptions) -> int:
    from lookback.importing.elastic import ARRAYS, NDJSON, TOML, read_rules

    def read(files: list[RuleFile], names: NameMap, stream: Stream | None) -> list[Detection | Unread]:
        known = () if stream is None else stream.fields
        return read_rules(files, is_scheduled=options.moment == "schedule", known=[*names.fields, *known])

    return _import(options, read, (TOML, NDJSON), arrays=ARRAYS)


def _import(
    options: CommandOptions,
    read: _Read,
    suffixes: Sequence[str],
    *,
    arrays: Set[str] = frozenset(),
    skeletons: str | None = None,
) -> int:
    """Reads rules by `read`, writes them, and shows the report. Returns the exit code.

    Args:
        options: Of the command.
        read: Reads files by a map, for a stream if it is declared already.
        suffixes: Of the files in folders.
        arrays: Fields that a drafted stream has as arrays.
        skeletons: The folder for rules without a condition.
    """
    from lookback.importing.mapping import load_map
    from lookback.importing.rulefiles import find_files
    from lookback.importing.run import Target, write_rules

    names, place = load_map(options.map), options.open_workspace()
    draft = None if options.draft_stream is None else Path(options.draft_stream)
    _require_new(draft)
    _require_report(options.report)
    stream = None if draft is not None else place.stream
    found = read(find_files(options.files, suffixes), names, stream)
    if draft is not None:
        from lookback.importing.drafting import draft_stream, read_draft

        text = draft_stream(options.stream, found, names, arrays)
        stream = read_draft(text)
        draft.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(text, encoding="utf-8")
    assert isinstance(stream, Stream)
    names.require_fields(stream)
    rules = Path(options.out or place.conf / "rules")
    hollow = None if skeletons is None else Path(skeletons)
    target = Target(stream, rules, Path(options.lists or place.conf / "lists"), hollow)
    report = write_rules(found, target, names)
    _show(options, report)
    return FOUND_PROBLEMS if report.has_failed(is_strict=options.strict) else 0


def _require_new(draft: Path | None) -> None:
    if draft is not None and draft.exists():
        raise SetupError(f"{draft} already exists; leave --draft-stream out to use it, or name a new file")


def _require_report(report: str | None) -> None:
    """Raises SetupError if a file is there that is not the report of an import."""
    if report is not None and (path := Path(report)).exists():
        text = path.read_bytes()[:100] if path.is_file() else b""
        if b" in " not in text or b", for stream " not in text:
            raise SetupError(f"{path} exists and is not a report of an import; give --report a new file")


def _show(options: CommandOptions, report: Report) -> None:
    """Prints the report, or writes its lines to a file and prints the counts."""
    head, lines, counts = report.list_head(), [str(line) for line in report.lines], report.list_counts()
    if options.report is not None:
        text = "".join(f"{escape_unprintable(line)}\n" for line in (*head, "", *lines, "", *counts))
        Path(options.report).write_text(text, encoding="utf-8")
    if options.wants_json:
        print_json(line.to_row() for line in report.lines)
        return
    print_lines(*head, *(lines if options.report is None else ()), *counts)

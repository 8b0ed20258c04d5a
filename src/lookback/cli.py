"""The command line: the same work as the notebooks, for places without them."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from lookback.commands import alerts, backtests, imports, lists, rules, streams, upkeep
from lookback.commands.options import FOUND_PROBLEMS, WRONG_USE, CommandOptions, Commands, option
from lookback.config import Settings
from lookback.core.errors import LookbackError, RuleError, SetupError, StreamError
from lookback.spark.platform.faults import explain_full_disk
from lookback.views.terminal import OutputClosed, print_json, safe_output

# As of a program that SIGPIPE ends: 128 + 13.
_OUTPUT_CLOSED = 141
# `pip install lookback-rules` alone leaves these out, as a cluster of Databricks has its own.
_SPARK = ("pyspark", "delta", "py4j")
_NO_SPARK = "this command needs Spark and Delta, which are not installed here: pip install 'lookback-rules[local]'"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command. Returns 0, or 1 if it found problems, 2 for wrong use, 141 if nobody reads its output any more."""
    with safe_output():
        try:
            try:
                return _run(arguments)
            finally:
                sys.stdout.flush()
        except OutputClosed:
            # Python writes the rest of its buffer when it ends, and would complain.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return _OUTPUT_CLOSED


def _run(arguments: Sequence[str] | None) -> int:
    parser = _make_parser()
    options = parser.parse_args(arguments, CommandOptions())
    try:
        return int(options.run(options) or 0)
    except (RuleError, StreamError) as error:
        print(error, file=sys.stderr)
        return FOUND_PROBLEMS
    except Exception as error:
        if (text := _describe_failure(error)) is None:
            raise
        print(f"lookback: {text}", file=sys.stderr)
        return WRONG_USE


def _describe_failure(error: Exception) -> str | None:
    """Says what a user can do about an error; None if only a developer can."""
    if isinstance(error, LookbackError):
        return str(error)
    if isinstance(error, ModuleNotFoundError):
        return _NO_SPARK if (error.name or "").partition(".")[0] in _SPARK else None
    full = explain_full_disk(error)
    return None if full is None else str(full)


def _make_parser() -> argparse.ArgumentParser:
    places = argparse.ArgumentParser(add_help=False)
    # These may stand before or after the command; SUPPRESS keeps one from overwriting the other.
    texts = {
        "--root": "folder of the tables (LOOKBACK_ROOT; ./lakehouse); with --catalog that of checkpoints "
        "(the schema's volume checkpoints)",
        "--catalog": "catalog of the tables, if they are not folders; with --schema",
        "--schema": "schema of the tables in the catalog",
        "--warehouse": "id of a SQL warehouse that reads them, without Spark",
        "--conf": "folder of streams/ and rules/ (./conf)",
    }
    for name, text in texts.items():
        option(places, name, text, default=argparse.SUPPRESS)
    text = "one JSON object a line for what is listed"
    option(places, "--json", text, action="store_true", default=argparse.SUPPRESS)
    parser = argparse.ArgumentParser(prog="lookback", description=__doc__, parents=[places])
    commands = Commands(parser, places)
    for subject in (upkeep, rules, streams, alerts, lists, backtests, imports):
        subject.add_commands(commands)
    commands.add("mcp", _mcp, "serve an assistant over stdio, by the Model Context Protocol")
    new = commands.add("new", _new, "make a repository of your own: conf, rules, CI and a Databricks bundle")
    option(new, "folder", "a new or empty folder", "DIR", type=Path)
    demo = commands.add("demo", _demo, "the main job on real transactions, in a folder of its own")
    option(demo, "--events", "Parquet file of transactions (default: the sample in conf/samples)")
    return parser


def _new(options: CommandOptions) -> None:
    from lookback.project import make_project

    files = make_project(options.folder)
    if options.wants_json:
        print_json({"file": name} for name in files)
        return
    print(f"wrote {len(files)} files into {options.folder}; its README.md says what to do first")


def _mcp(options: CommandOptions) -> None:
    from lookback.agents import serve

    names = ("root", "catalog", "schema", "warehouse", "conf")
    places = [f"--{name}={getattr(options, name)}" for name in names if hasattr(options, name)]
    serve(lambda arguments: _run([*places, *arguments]), options.open_workspace().conf)


def _demo(options: CommandOptions) -> None:
    from lookback.demo import run_demo

    if hasattr(options, "catalog") or hasattr(options, "schema"):
        raise SetupError("the demo makes tables in a folder of its own; leave --catalog and --schema out")
    settings = Settings.local(getattr(options, "root", None) or "./lakehouse/demo", getattr(options, "conf", None))
    run_demo(settings, None if options.events is None else Path(options.events))


if __name__ == "__main__":
    sys.exit(main())

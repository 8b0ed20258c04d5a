"""What all commands share: how they declare options, open their place, print results, and end on a signal."""

from __future__ import annotations

import argparse
import datetime as dt
import importlib.util
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from lookback.config import Settings
from lookback.core.errors import SetupError
from lookback.core.values.texts import escape_unprintable
from lookback.core.values.times import parse_calendar_time, to_utc
from lookback.verbs import Workspace
from lookback.views.terminal import print_json, print_table

if TYPE_CHECKING:
    from lookback.spark.tables.lakehouse import Tables

FOUND_PROBLEMS, WRONG_USE = 1, 2
FORMATS = ["parquet", "csv", "json"]
# The number of kinds of rejected rows to print.
_MAX_REASONS = 5


class CommandOptions(argparse.Namespace):
    """The options of a command as given: opens the place that they name, and prints results as they say."""

    @property
    def wants_json(self) -> bool:
        """Whether --json was given, before or after the command."""
        return bool(getattr(self, "json", False))

    @property
    def progress(self) -> Callable[[str], None] | None:
        """Prints lines of progress; None with --json."""
        return None if self.wants_json else print_line

    def open_workspace(self) -> Workspace:
        """Returns the place of --root or --catalog and --schema, --conf and --profile. Raises SetupError."""
        given = (getattr(self, name, None) for name in ("root", "conf", "profile", "catalog", "schema"))
        settings, stream = Settings.local(*given), getattr(self, "stream", None) or ""
        warehouse = getattr(self, "warehouse", None)
        if warehouse is None:
            return Workspace(settings, stream, announce)
        return Workspace(settings, stream, announce, warehouse=cache(partial(_open_warehouse, settings, warehouse)))

    def read_time(self, name: str) -> int | None:
        """Parses the time of an option, in microseconds; None if the option is missing. Raises SetupError."""
        text = getattr(self, name)
        try:
            return None if text is None else parse_calendar_time(text)
        except ValueError:
            given = name.replace("_", "-")
            raise SetupError(f"--{given} must be a time such as 2026-01-31T12:00:00Z, got {text!r:.100}") from None

    def read_moment(self, name: str) -> dt.datetime | None:
        """Parses the time of an option; None if the option is missing. Raises SetupError."""
        time = self.read_time(name)
        return None if time is None else to_utc(time)

    def show_rows(self, rows: Sequence[Mapping[str, Any]], names: Sequence[str], *lines: object) -> None:
        """Prints rows as JSON if wanted, else the named columns as a table, and then the lines."""
        if self.wants_json:
            print_json(rows)
        else:
            print_table(rows, names)
            print_lines(*lines)

    def show_report(self, report: Any, *lines: object) -> None:
        """Prints a report as JSON if wanted, else the lines, or the report itself, and the first kinds of rejected rows."""
        if self.wants_json:
            print_json([asdict(report)])
        else:
            rejections = getattr(report, "rejections", ())[:_MAX_REASONS]
            print_lines(*lines or [report], *(f"  {each}" for each in rejections))


def _open_warehouse(settings: Settings, warehouse: str) -> Tables:
    """Opens the tables of a catalog over a SQL warehouse. Raises SetupError or RemoteError."""
    if importlib.util.find_spec("databricks.sdk") is None:
        raise SetupError("--warehouse needs databricks-sdk: pip install 'lookback-rules[remote]'")
    if not (settings.catalog and settings.schema):
        raise SetupError("--warehouse reads the tables of a catalog; name it by --catalog and --schema")
    from lookback.remote.statements import prepare_queries
    from lookback.remote.workspace import open_workspace
    from lookback.spark.tables.warehouse import open_warehouse

    workspace = open_workspace()
    return open_warehouse(prepare_queries(workspace, warehouse), workspace.user, settings.catalog, settings.schema)


# Returns the exit code; None means 0.
RunCommand = Callable[[CommandOptions], "int | None"]


class Commands:
    """Adds commands to a parser, each with the options of `places`."""

    def __init__(self, parser: argparse.ArgumentParser, places: argparse.ArgumentParser) -> None:
        self._parsers = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
        self._places = places

    def add(
        self, name: str, run: RunCommand | None, text: str, *arguments: str, **values: object
    ) -> argparse.ArgumentParser:
        """Adds a command that calls `run`, with `text` for --help. Returns its parser.

        `arguments` are required and need no further text; `values` are options that the user cannot choose.
        """
        parser: argparse.ArgumentParser = self._parsers.add_parser(
            name, help=text, description=text, parents=[self._places]
        )
        parser.set_defaults(run=run, **values)
        for argument in arguments:
            parser.add_argument(argument)
        return parser

    def add_group(self, name: str, text: str) -> Commands:
        """Adds a command that has commands of its own. Returns their place."""
        return Commands(self.add(name, None, text), self._places)


def option(to: Any, name: str, text: str | None = None, metavar: str | None = None, **how: Any) -> None:
    """Adds an argument or option to a parser or to a group of options, with `text` for --help."""
    to.add_argument(name, help=text, **({} if metavar is None else {"metavar": metavar}), **how)


def flag(to: Any, name: str, text: str) -> None:
    """Adds an option without a value."""
    to.add_argument(name, help=text, action="store_true")


def add_author(to: Any, text: str | None = None) -> None:
    """Adds the author and comment of a version."""
    option(to, "--author", text, default="")
    option(to, "--comment", default="")


def add_format(to: Any, text: str | None = "format of the file (default: from its name)", **how: Any) -> None:
    """Adds the format of files."""
    option(to, "--format", text, choices=FORMATS, **how)


def add_checkpoint(to: Any, text: str = "folder of the checkpoint (default: below the root)") -> None:
    """Adds the folder of a checkpoint."""
    option(to, "--checkpoint", text)


def announce(text: str) -> None:
    """Prints what a command is doing to stderr, so that programs reading its output do not see it."""
    print(f"{text} ...", file=sys.stderr, flush=True)


def print_lines(*lines: object) -> None:
    """Prints each line with its control characters escaped."""
    for line in lines:
        print(escape_unprintable(str(line)))


def warn(text: str) -> None:
    """Prints a line to stderr, with its control characters escaped."""
    print(escape_unprintable(text), file=sys.stderr)


def print_line(line: str) -> None:
    """Prints a line and flushes it, so that it shows immediately, even through a pipe."""
    print(line, flush=True)


def stop_on_signals(stop: Callable[[], None]) -> None:
    """Calls `stop` on SIGTERM and SIGINT, for a clean end; the next start repeats an unfinished batch."""
    signal.signal(signal.SIGTERM, lambda *_: stop())
    signal.signal(signal.SIGINT, lambda *_: stop())

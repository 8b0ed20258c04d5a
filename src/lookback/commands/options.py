"""Reads the shared options of all commands, opens the place they refer to, and ends a command on a signal."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from lookback.config import Settings
from lookback.core.errors import SetupError
from lookback.core.values.times import parse_calendar_time

if TYPE_CHECKING:
    from lookback.core.streams.declaration import Stream
    from lookback.spark.tables.lakehouse import Tables

FOUND_PROBLEMS, WRONG_USE = 1, 2
_Answer = TypeVar("_Answer")
# Returns the exit code; None means 0.
RunCommand = Callable[[argparse.Namespace], "int | None"]


class AddCommand(Protocol):
    """Adds a command that calls `run`, and returns its parser."""

    def __call__(self, name: str, run: RunCommand, text: str) -> Any:
        """Adds the command, with `text` as its description for --help."""


def make_adder(commands: Any, places: argparse.ArgumentParser) -> AddCommand:
    """Returns a function that adds commands to the sub-parsers `commands`, with the shared options `places`."""

    def command(name: str, run: RunCommand, text: str) -> Any:
        sub = commands.add_parser(name, help=text, description=text, parents=[places])
        sub.set_defaults(run=run)
        return sub

    return command


def wants_json(options: argparse.Namespace) -> bool:
    """Returns whether --json was given, before or after the command."""
    return bool(getattr(options, "json", False))


def load_settings(options: argparse.Namespace) -> Settings:
    """Loads the settings of --root or --catalog and --schema, --conf and --profile. Raises SetupError."""
    given = (getattr(options, name, None) for name in ("root", "conf", "profile", "catalog", "schema"))
    return Settings.local(*given)


def open_tables(settings: Settings, *streams: Stream, kafka: bool = False) -> Tables:
    """Starts or finds Spark. Returns the tables of the place. With `kafka` it also loads the library for topics."""
    from lookback.spark.platform.session import get_spark, has_session
    from lookback.spark.tables.lakehouse import Tables

    if not has_session():
        announce("starting Spark")
    return Tables.of(get_spark(settings=settings.spark, kafka=kafka), settings).holding(*streams)


def answer(settings: Settings, compute: Callable[[Tables], _Answer], *streams: Stream) -> _Answer:
    """Computes a command's result from the tables of the place, without starting Spark if possible.

    `compute` only reads, returns rows instead of frames, and may run twice: if the tables are not folders, or have
    features that only Spark reads reliably, Spark runs it again. For `streams` see `Tables.holding`.
    """
    from lookback.spark.tables.answers import compute_at_once

    root = None if settings.catalog else settings.root
    return compute_at_once(
        lambda tables: compute(tables.holding(*streams)), root, lambda: open_tables(settings, *streams)
    )


def announce(text: str) -> None:
    """Prints what a command is doing to stderr, so that programs reading its output do not see it."""
    print(f"{text} ...", file=sys.stderr, flush=True)


def read_time(options: argparse.Namespace, name: str) -> int | None:
    """Parses the time of an option, in microseconds; None if the option is missing. Raises SetupError."""
    text = getattr(options, name)
    try:
        return None if text is None else parse_calendar_time(text)
    except ValueError:
        option = name.replace("_", "-")
        raise SetupError(f"--{option} must be a time such as 2026-01-31T12:00:00Z, got {text!r:.100}") from None


def print_line(line: str) -> None:
    """Prints a line and flushes it, so that it shows immediately, even through a pipe."""
    print(line, flush=True)


def stop_on_signals(stop: Callable[[], None]) -> None:
    """Calls `stop` on SIGTERM and SIGINT, for a clean end; the next start repeats an unfinished batch."""
    signal.signal(signal.SIGTERM, lambda *_: stop())
    signal.signal(signal.SIGINT, lambda *_: stop())

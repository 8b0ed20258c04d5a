"""Prints for the command line: tables for people, JSON lines for programs, with terminal control characters escaped."""

from __future__ import annotations

import contextlib
import datetime as dt
import importlib.util
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TextIO

from lookback.core.values.columns import to_text
from lookback.core.values.texts import cut_end, escape_unprintable, join_words

_MAX_CELL_CHARACTERS = 80
# Control characters except tab and line feed, marks of the writing direction, other line breaks, lone surrogates.
_STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
# Nobody reads more rows in a terminal, and drawing them takes longer than finding them.
_MAX_DRAWN_ROWS = 1_000


class OutputClosed(Exception):
    """Whoever read what a command prints has gone, as `head` does when it has seen enough."""


class SafeOutput:
    """A text stream that escapes terminal control characters in everything a command prints, except line breaks.

    Once its reader has gone it raises OutputClosed.
    """

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        """Writes a text, and returns its length."""
        try:
            self.stream.write(_STEERING.sub(lambda match: ascii(match[0])[1:-1], text))
        except BrokenPipeError as error:
            raise OutputClosed from error
        return len(text)

    def flush(self) -> None:
        """Writes what is buffered."""
        try:
            self.stream.flush()
        except BrokenPipeError as error:
            raise OutputClosed from error

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextlib.contextmanager
def safe_output() -> Iterator[None]:
    """Makes stdout and stderr of this process safe for a terminal until the end of the block."""
    outputs = SafeOutput(sys.stdout), SafeOutput(sys.stderr)
    with contextlib.redirect_stdout(outputs[0]), contextlib.redirect_stderr(outputs[1]):
        yield


def get_raw_output() -> TextIO:
    """Returns the unescaped stdout, for escaped text and for documents that must not change."""
    return sys.stdout.stream if isinstance(sys.stdout, SafeOutput) else sys.stdout


def print_document(text: str) -> None:
    """Prints the text of a file; output to a file is unchanged."""
    try:
        print(text, end="", file=sys.stdout if sys.stdout.isatty() else get_raw_output(), flush=True)
    except BrokenPipeError as error:
        raise OutputClosed from error


def print_json(rows: Iterable[Mapping[str, Any]]) -> None:
    """Prints each row as a JSON object on its own line."""
    for row in rows:
        print(format_json(row))


def format_json(row: Mapping[str, Any]) -> str:
    """Formats a row as JSON: decimals as strings, times as ISO 8601 with Z."""
    text = json.dumps(row, ensure_ascii=False, default=_format_value)
    return _STEERING.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def print_table(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> None:
    """Prints the named columns of rows with a header: fitted to a terminal's width, elsewhere one line per row."""
    cells = [[format_cell(row.get(name)) for name in names] for row in rows]
    # A cluster's terminal may lack rich, which is not part of Databricks' runtimes.
    if sys.stdout.isatty() and len(cells) <= _MAX_DRAWN_ROWS and importlib.util.find_spec("rich"):
        _draw_table(cells, names)
        return
    widths = [
        max(len(name), *(len(row[at]) for row in cells), 0) if cells else len(name) for at, name in enumerate(names)
    ]
    for line in [list(names), *cells]:
        print("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip())


def _draw_table(cells: Sequence[Sequence[str]], names: Sequence[str]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in names:
        # Long texts wrap, so that ids and messages are complete.
        table.add_column(Text(name), overflow="fold")
    for row in cells:
        # Plain text, so that brackets in a value are not read as markup.
        table.add_row(*map(Text, row))
    Console(file=get_raw_output()).print(table)


def describe_change(row: Mapping[str, Any]) -> str:
    """Describes a row of rule_log in a few words: the rule and its version, if it names them, and the action."""
    version = None if row["version"] is None else f"v{row['version']}"
    return " ".join(part for part in (row["rule_id"], version, row["action"]) if part)


def print_health(status: Mapping[str, Any]) -> None:
    """Prints the sentence on a stream's health, then each finding and its remedy."""
    print(escape_unprintable(status["health"]))
    if account := status.get("account"):
        print(f"  {describe_account(account)}")
    for finding in status["findings"]:
        # Findings quote values from events and rules.
        print(escape_unprintable(f"  {finding['level']}: {finding['what']}"))
        print(escape_unprintable(f"    {finding['remedy']}"))


def describe_account(account: Mapping[str, Any]) -> str:
    """Describes the counts of a stream's events; see `lookback.spark.operations.status.find_recent_account`."""

    def format_sum(*names: str) -> str:
        return " + ".join(f"{account[name]:,} {name}" for name in names)

    rounds = "the last round" if account["rounds"] == 1 else f"the last {account['rounds']:,} rounds"
    return (
        f"{rounds} of ingest, since {format_cell(account['since'])}: "
        f"{account['offered']:,} offered = {format_sum('ingested', 'duplicates', 'rejected')}; "
        f"{account['ingested']:,} ingested = {format_sum('evaluated', 'recorded', 'discarded', 'waiting')}"
        f"{'' if account['closes'] else '. This does not add up: rows were deleted, or written outside Lookback'}"
    )


def format_cell(value: Any) -> str:
    """Formats a value for a table: times to the second, at most 80 characters."""
    if isinstance(value, dt.datetime):
        value = value.astimezone(dt.timezone.utc).replace(microsecond=0)
    return cut_end(escape_unprintable(to_text(value) or ""), _MAX_CELL_CHARACTERS)


def _format_value(value: Any) -> Any:
    if isinstance(value, dt.datetime) and value.tzinfo is None:
        # Spark returns local times without a zone.
        value = value.astimezone(dt.timezone.utc)
    return to_text(value)


def describe_redundant(rows: Iterable[Mapping[str, Any]]) -> str:
    """Says which rules add nothing, given the rows of an overlap: rules `a` with `adds_nothing`."""
    names = [str(row["a"]) for row in rows if row["adds_nothing"]]
    if not names:
        return "Each rule alone flags something that is, or may be, positive: none can be retired without a loss."
    verb = "adds" if len(names) == 1 else "add"
    return (
        f"{join_words(names)} {verb} nothing: without {'it' if len(names) == 1 else 'them'} every event that is "
        "positive or has no label is still flagged."
    )

"""Prints for the command line: tables for people, JSON lines for programs, and nothing that steers a terminal."""

from __future__ import annotations

import datetime as dt
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lookback.core.values.columns import to_text
from lookback.core.values.texts import cut_end, join_words

_MAX_CELL_CHARACTERS = 80
# Nobody reads more in a terminal, and to draw them takes longer than to find them.
_MAX_DRAWN_ROWS = 1_000


def print_json(rows: Iterable[Mapping[str, Any]]) -> None:
    """Prints each row as a JSON object on a line."""
    for row in rows:
        print(format_json(row))


def format_json(row: Mapping[str, Any]) -> str:
    """Formats a row as JSON: decimals as strings, times as ISO 8601 with Z."""
    return json.dumps(row, ensure_ascii=False, default=_format_value)


def print_table(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> None:
    """Prints the named columns of the rows below their names: in a terminal as wide as it is, elsewhere a line for each row."""
    cells = [[format_cell(row.get(name)) for name in names] for row in rows]
    if sys.stdout.isatty() and len(cells) <= _MAX_DRAWN_ROWS:
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
        # What is too wide goes on below, so that ids and messages are there in full.
        table.add_column(Text(name), overflow="fold")
    for row in cells:
        # A text, not markup: brackets in a value mean nothing.
        table.add_row(*map(Text, row))
    Console().print(table)


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
        # Findings quote values of events and rules.
        print(escape_unprintable(f"  {finding['level']}: {finding['what']}"))
        print(escape_unprintable(f"    {finding['remedy']}"))


def describe_account(account: Mapping[str, Any]) -> str:
    """Describes the account of a stream's events in a sentence; see `lookback.spark.operations.status.find_recent_account`."""

    def format_sum(*names: str) -> str:
        return " + ".join(f"{account[name]:,} {name}" for name in names)

    rounds = "the last round" if account["rounds"] == 1 else f"the last {account['rounds']:,} rounds"
    return (
        f"{rounds} of ingest, since {format_cell(account['since'])}: "
        f"{account['offered']:,} offered = {format_sum('ingested', 'duplicates', 'rejected')}; "
        f"{account['ingested']:,} ingested = {format_sum('evaluated', 'recorded', 'discarded', 'waiting')}"
        f"{'' if account['closes'] else '. This does not add up: rows were deleted, or written by others'}"
    )


def format_cell(value: Any) -> str:
    """Formats a value for a table: times to the second, at most 80 characters."""
    if isinstance(value, dt.datetime):
        value = value.astimezone(dt.timezone.utc).replace(microsecond=0)
    return cut_end(escape_unprintable(to_text(value) or ""), _MAX_CELL_CHARACTERS)


def escape_unprintable(text: str) -> str:
    """Escapes the unprintable characters of a text: messages quote events, whose values must not steer the terminal."""
    return "".join(character if character.isprintable() else ascii(character)[1:-1] for character in text)


def _format_value(value: Any) -> Any:
    if isinstance(value, dt.datetime) and value.tzinfo is None:
        # Spark returns local times without a zone.
        value = value.astimezone(dt.timezone.utc)
    return to_text(value)


def describe_redundant(rows: Iterable[Mapping[str, Any]]) -> str:
    """Says which rules add nothing to the others. rows: rules `a` with `adds_nothing`, as an overlap has them."""
    names = [str(row["a"]) for row in rows if row["adds_nothing"]]
    if not names:
        return "Every rule alone flags something that is positive, or may be: none can be retired without a loss."
    verb = "adds" if len(names) == 1 else "add"
    return (
        f"{join_words(names)} {verb} nothing to the others: without {'it' if len(names) == 1 else 'them'} every event that is "
        "positive or has no label is still flagged."
    )

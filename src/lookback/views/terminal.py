"""How the command line prints: tables for people, a JSON object a line for programs, nothing that steers a terminal."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lookback.core.values.columns import text_of


def print_json(rows: Iterable[Mapping[str, Any]]) -> None:
    """Each row as a JSON object on a line."""
    for row in rows:
        print(as_json(row))


def as_json(row: Mapping[str, Any]) -> str:
    """A row as JSON: decimals as strings, times as ISO 8601 with Z."""
    return json.dumps(row, ensure_ascii=False, default=_plain)


def print_table(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> None:
    """The named columns of the rows below each other."""
    cells = [[cell_text(row.get(name)) for name in names] for row in rows]
    widths = [
        max(len(name), *(len(row[at]) for row in cells), 0) if cells else len(name) for at, name in enumerate(names)
    ]
    for line in [list(names), *cells]:
        print("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip())


def describe_change(row: Mapping[str, Any]) -> str:
    """A row of rule_log in a few words: the rule and its version, where it names them, and the action."""
    version = None if row["version"] is None else f"v{row['version']}"
    return " ".join(part for part in (row["rule_id"], version, row["action"]) if part)


def print_health(status: Mapping[str, Any]) -> None:
    """The sentence on a stream's health, then each finding and what to do about it."""
    print(visible(status["health"]))
    if account := status.get("account"):
        print(f"  {account_in_words(account)}")
    for finding in status["findings"]:
        # It quotes what events and rules hold.
        print(visible(f"  {finding['level']}: {finding['what']}"))
        print(visible(f"    {finding['remedy']}"))


def account_in_words(account: Mapping[str, Any]) -> str:
    """The account of a stream's events in a sentence; see `lookback.spark.operations.status.recent_account`."""

    def sum_of(*names: str) -> str:
        return " + ".join(f"{account[name]:,} {name}" for name in names)

    rounds = "the last round" if account["rounds"] == 1 else f"the last {account['rounds']:,} rounds"
    return (
        f"{rounds} of ingest, since {cell_text(account['since'])}: "
        f"{account['offered']:,} offered = {sum_of('ingested', 'duplicates', 'rejected')}; "
        f"{account['ingested']:,} ingested = {sum_of('evaluated', 'recorded', 'discarded', 'waiting')}"
        f"{'' if account['closes'] else '. This does not add up: rows were deleted, or written by others'}"
    )


def cell_text(value: Any) -> str:
    """A value as it stands in a table: times to the second, at most 80 characters."""
    if isinstance(value, dt.datetime):
        value = value.astimezone(dt.timezone.utc).replace(microsecond=0)
    text = visible(text_of(value) or "")
    return text if len(text) <= 80 else text[:77] + "..."


def visible(text: str) -> str:
    """The text, with escapes in place of what would steer the terminal: events choose what a message holds."""
    return "".join(character if character.isprintable() else ascii(character)[1:-1] for character in text)


def _plain(value: Any) -> Any:
    if isinstance(value, dt.datetime) and value.tzinfo is None:
        # Spark hands out local times without a zone.
        value = value.astimezone(dt.timezone.utc)
    return text_of(value)

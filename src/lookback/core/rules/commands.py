"""Commands for a stream, which are rows of the rules table with rule_id `*`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from lookback.core.rules.changes import MAX_VERSION, RETIRE_ALL, Rejected, RuleChange
from lookback.core.rules.document import read_document
from lookback.core.rules.problems import quote_value
from lookback.core.rules.quarantine import AUTHOR
from lookback.core.rules.versions import WARM, Piece, Warming
from lookback.core.values.times import parse_calendar_time

COMMANDS = ("clear_state", RETIRE_ALL, "advance")
# The status of a row that names a commit of table `lists`, which the stream writes itself, and its action in rule_log.
LISTS, LIST_CHANGED = "lists", "list"
DELETE_ROW = "delete the row: the stream writes such rows itself when the table changes"
# Why a row with a piece of history is rejected.
NOT_BY_ENGINE = "only the stream itself writes rows with status warm; delete the row (status)"


@dataclass(frozen=True)
class Command:
    """A command row for this stream, or the start of a warm-up."""

    action: str
    time: int | None = None  # of `advance`: the new watermark in microseconds
    commit: int | None = None  # of `lists`: the commit of the table
    piece: Piece | None = None  # of `warm`: a piece of history
    warms: bool | None = None  # see `RuleChange`
    opened: Warming | None = None  # of `warming`: the version whose features begin to keep rows
    rules_commit: int | None = None  # of `warm`: the commit of the rules table with the row


def read_command(change: RuleChange, stream: str, streams: Collection[str]) -> Mapping[str, Any] | None:
    """Reads the document of a command row; None for a row that asks nothing of `stream`.

    Raises:
        Rejected: The status is not a command, or the stream is unknown.
        RuleError: The document cannot be read.
    """
    if change.change != "insert":
        return None
    if change.status not in (*COMMANDS, LISTS, WARM):
        raise Rejected(f"a command's status must be one of {', '.join(COMMANDS)}, got {change.status!r:.40} (status)")
    document = read_document(change.document) if change.document else {}
    name = document.get("stream")
    if change.status == WARM:
        return document if name == stream else None
    if name is None or name == stream:
        return document
    if not isinstance(name, str) or name not in streams:
        known = ", ".join(sorted(streams))
        raise Rejected(f"unknown stream {quote_value(name)}; known: {known}; leave it out for all (stream)")
    return None


def read_time(document: Mapping[str, Any]) -> int:
    """Returns the time to which a command advances the watermark, in microseconds. Raises Rejected."""
    try:
        return parse_calendar_time(document.get("time"))
    except ValueError:
        time = quote_value(document.get("time"))
        raise Rejected(f"advance needs a time such as '2026-01-31T12:00:00Z', got {time} (time)") from None


def read_lists_commit(change: RuleChange, document: Mapping[str, Any]) -> int:
    """Returns the commit of table `lists` that a row names. Raises Rejected."""
    commit = document.get("commit")
    if type(commit) is not int or not 0 <= commit < MAX_VERSION:
        raise Rejected(
            f"commit must be the number of a commit of table lists, got {quote_value(commit)}; {DELETE_ROW} (commit)"
        )
    if not _is_by_engine(change):
        raise Rejected(f"the stream did not write this row; {DELETE_ROW} (author)")
    return commit


def read_piece(change: RuleChange, document: Mapping[str, Any]) -> Piece:
    """Returns the piece of history that a row names. Raises Rejected."""
    try:
        piece = Piece.from_document(document)
    except ValueError:
        raise Rejected(NOT_BY_ENGINE) from None
    if not _is_by_engine(change):
        raise Rejected(NOT_BY_ENGINE)
    return piece


def _is_by_engine(change: RuleChange) -> bool:
    """Returns whether the engine wrote a row; in a replay the author is unknown and it counts as the engine's."""
    return change.author in (None, AUTHOR)

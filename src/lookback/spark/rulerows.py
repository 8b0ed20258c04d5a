"""Reads rows of the rules table: which of a rule's versions are sound, current, rejected or warming."""

from __future__ import annotations

import contextlib
import datetime as dt
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from lookback.core.errors import LookbackError
from lookback.core.rules.changes import MAX_VERSION, RuleChange
from lookback.core.rules.compiling import compile_rule
from lookback.core.rules.document import STATUSES, read_document
from lookback.core.rules.gate import find_objection
from lookback.core.rules.quarantine import Quarantine
from lookback.core.rules.roles import SHADOW, find_roles
from lookback.core.rules.rulebook import RuleBook
from lookback.core.rules.versions import Entry
from lookback.core.streams.declaration import Stream
from lookback.core.values.limits import WIDEST_LIMITS
from lookback.spark.tables.schemas import RULES

if TYPE_CHECKING:
    from pyspark.sql import Row

    from lookback.spark.tables.lakehouse import Tables


@dataclass(frozen=True)
class RuleRow:
    """A version of a rule in the table. `document` is None if it is not valid JSON."""

    rule_id: str
    version: int
    status: str
    document: dict[str, Any] | None
    author: str | None
    comment: str | None
    changed_at: dt.datetime | None
    approved_by: str | None = None
    evidence: str | None = None


def count_next_version(rows: Sequence[Row]) -> int:
    """Returns the number of the version after these rows of a rule."""
    # A row without a version took the next number when it was written. Versions beyond the maximum are rejected.
    numbers = (row["version"] or 0 for row in rows if (row["version"] or 0) < MAX_VERSION)
    return max([0, *numbers]) + 1 + sum(row["version"] is None for row in rows)


def list_sound(rows: Iterable[Row]) -> list[Row]:
    """Lists the sound rows of each rule, or all its rows if none is sound."""
    rows = list(rows)
    sound = [row for row in rows if _is_sound(row)]
    known = {row["rule_id"] for row in sound}
    return sound + [row for row in rows if row["rule_id"] not in known]


def _is_sound(row: Row) -> bool:
    """Returns whether a row can be a version of a rule, as far as can be checked without its stream."""
    if row["status"] not in STATUSES or not 0 <= (row["version"] or 0) < MAX_VERSION:
        return False
    try:
        document = read_document(row["document"], WIDEST_LIMITS)
    except LookbackError:
        return False
    return document.get("rule_id") == row["rule_id"] and isinstance(document.get("stream"), str)


def is_objectionable(row: Row) -> bool:
    """Returns whether an enforced gate would reject an active row."""
    if row["status"] != "active":
        return False
    try:
        document = read_document(row["document"])
    except LookbackError:
        return False
    return bool(find_objection(document, row["author"], row["approved_by"], row["evidence"]))


def list_by_role(rows: Iterable[Row]) -> list[RuleRow]:
    """Lists the current rows by rule_id (see `find_roles`)."""
    by_rule: dict[str, list[Row]] = {}
    for row in rows:
        by_rule.setdefault(row["rule_id"], []).append(row)
    return [make_rule_row(row) for _, own in sorted(by_rule.items()) for row in find_roles(own).listed]


def find_document_author(rows: list[Row], evidence: str | None) -> str:
    """Finds the author in the first row that became active with this evidence; empty if there is none."""
    proven = [row for row in rows if row["status"] == "active" and row["evidence"] == evidence]
    return next((row["author"] or "" for row in sorted(proven, key=lambda row: row["version"] or 0)), "")


def find_last(rows: Iterable[Row]) -> RuleRow | None:
    """Finds the row with the highest version; on a tie the last row."""
    last: Row | None = None
    for row in rows:
        if last is None or (row["version"] or 0) >= (last["version"] or 0):
            last = row
    return None if last is None else make_rule_row(last)


def find_stream(row: Row, streams: Mapping[str, Stream]) -> Stream | None:
    """Finds the stream of a row; None if the row is not a valid rule."""
    with contextlib.suppress(LookbackError):
        document = read_document(row["document"], WIDEST_LIMITS)
        stream = streams.get(str(document.get("stream")))
        # A rule in force stays valid even if the limits of its stream were lowered.
        if stream and compile_rule(document, replace(stream, limits=WIDEST_LIMITS)).spec.rule_id == row["rule_id"]:
            return stream
    return None


def make_rule_row(row: Row) -> RuleRow:
    """Reads a row; a document that is not valid becomes None."""
    try:
        document = read_document(row["document"])
    except LookbackError:
        document = None
    columns = row.asDict() | {"version": row["version"] or 0, "document": document}
    return RuleRow(**{name: columns[name] for name in RULES.names})


def find_failing_document(quarantine: Quarantine, rows: Sequence[Row], streams: Mapping[str, Stream]) -> str | None:
    """Returns the document of the failing version; None if it has no row or a later version has its role."""
    rule_id, version = quarantine.rule_id, quarantine.version
    failing = [row for row in rows if row["version"] == version] or [row for row in rows if row["version"] is None]
    for row in failing:
        stream = find_stream(row, streams)
        if stream is None:
            continue
        status = SHADOW if row["status"] == SHADOW else "active"
        entry = Entry(rule_id, version, status, str(row["document"]), stream.name, version)
        book = RuleBook(stream, streams, {rule_id: entry})
        later = [row for row in rows if row["version"] is not None and row["version"] > version]
        columns = ("rule_id", "version", "status", "document", "evidence")
        book.apply((RuleChange("insert", 0, *(each[name] for name in columns)) for each in later), None)
        return str(row["document"]) if (rule_id, version) in book.list_versions() else None
    return None


def list_rule_ids(tables: Tables) -> list[str]:
    """Returns the ids of all rules that were ever published, in no order."""
    if not tables.exists("rules"):
        return []
    return [row[0] for row in tables.run("SELECT DISTINCT rule_id FROM rules WHERE rule_id <> '*'").collect()]


def find_rejected(tables: Tables, stream: str | None = None, rule_id: str | None = None) -> set[tuple[str, int]]:
    """Finds the versions, by rule_id and number, that a stream rejected and no stream applied; they are not in force.

    `stream` and `rule_id` restrict the search to one stream or rule.
    """
    rows = tables.ask("rejected_versions", stream=stream, rule_id=rule_id).collect()
    return {(row["rule_id"], row["version"]) for row in rows}


def find_warming(tables: Tables, stream: str | None = None) -> dict[tuple[str, int], dt.datetime]:
    """Finds the versions, by rule_id and number, that wait for the history of their windows, and since when.

    `stream` restricts the search to one stream. Versions that a later one has replaced may be included.
    """
    rows = tables.ask("warming_versions", stream=stream).collect()
    return {(row["rule_id"], row["version"]): row["since"] for row in rows}

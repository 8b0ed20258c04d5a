"""Reads the contents of lists as people write them: for the harness, for a replay and for the tests of a rule."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from lookback.core.errors import Problem, show_value
from lookback.core.values.addresses import explain_no_range
from lookback.core.values.listchanges import CIDR, ListChange
from lookback.core.values.lists import Lists
from lookback.core.values.suggestions import suggest
from lookback.core.values.times import parse_calendar_time

ROW_KEYS = ("value", "expires_at", "kind")
_EXAMPLE = "{known-terminals: [T1, {value: T2, expires_at: '2026-01-31T12:00:00Z'}]}"


def read_contents(contents: object, place: str = "lists") -> tuple[dict[str, list[ListChange]], list[Problem]]:
    """Reads lists by name, each with its values: texts, whole numbers, or mappings of value, expires_at and kind.

    Returns the rows by list, and every problem with its place.
    """
    if not isinstance(contents, Mapping):
        return {}, [
            Problem(
                place, f"must be a mapping of lists to their values, such as {_EXAMPLE}, got {show_value(contents)}"
            )
        ]
    problems: list[Problem] = []
    rows: dict[str, list[ListChange]] = {}
    for name, values in contents.items():
        here = f"{place}.{name}"
        if not isinstance(name, str) or not name.strip():
            problems.append(Problem(place, f"a list is named by a text, got {show_value(name)}"))
        elif isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Iterable):
            problems.append(Problem(here, f"must be a list of values, such as [T1, T2], got {show_value(values)}"))
        else:
            rows[name], places = [], list[str]()
            for at, value in enumerate(values):
                _read_row(name, value, f"{here}[{at}]", rows[name], problems)
                places += [f"{here}[{at}]"] * (len(rows[name]) - len(places))
            if any(row.kind == CIDR for row in rows[name]):
                explained = [explain_no_range(str(row.value)) for row in rows[name]]
                problems += [Problem(at, text) for at, text in zip(places, explained, strict=True) if text is not None]
    return rows, problems


def set_contents(before: Lists, contents: Mapping[str, Iterable[ListChange]], commit: int) -> Lists:
    """Returns the lists as of a commit that gave some of them these rows alone; the others are as they were."""
    others = before.select(before.names - contents.keys())
    return others.apply((row for rows in contents.values() for row in rows), commit)


def _read_row(name: str, value: Any, place: str, rows: list[ListChange], problems: list[Problem]) -> None:
    """Reads one row of a list, and adds it or its problems."""
    known, row = len(problems), value if isinstance(value, Mapping) else {"value": value}
    unknown = (key for key in row if key not in ROW_KEYS)
    problems += [Problem(place, f"unknown key {show_value(key)}; {suggest(key, ROW_KEYS)}") for key in unknown]
    text, kind, expires_at = row.get("value"), row.get("kind"), None
    if isinstance(text, bool) or not isinstance(text, (str, int)):
        remedy = "write it as cast(field as string) gives it"
        problems.append(Problem(place, f"the value must be a text or a whole number, got {show_value(text)}; {remedy}"))
    if kind not in (None, CIDR):
        remedy = f"write {CIDR} for ranges of addresses, or leave it out"
        problems.append(Problem(place, f"unknown kind {show_value(kind)}; {remedy}"))
    if row.get("expires_at") is not None:
        try:
            expires_at = parse_calendar_time(row["expires_at"])
        except ValueError:
            wanted = "must be a time such as '2026-01-31T12:00:00Z'"
            problems.append(Problem(place, f"expires_at {wanted}, got {show_value(row['expires_at'])}"))
    if len(problems) == known:
        rows.append(ListChange("insert", 0, name, str(text), expires_at, kind))

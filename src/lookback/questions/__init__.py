"""Contains the questions about a place's tables, each as a text of SQL that a person can read.

A text is in Spark's dialect. It names tables, and other questions, by their plain names, and values as `:name`. Spark and
SQL warehouses run it, DuckDB runs a translation, and in a catalog views answer it. This package knows no engine.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import NamedTuple

# In a catalog, views with these names answer a question, with these values.
VIEWS = ("open_queue", "standing_alerts", "labelled_events")
_VIEW_VALUES = {
    "since": "current_timestamp() - INTERVAL '90' DAY", "as_of": "current_timestamp()", "with_snoozed": "false",
    "reports": "false",
}  # fmt: skip
# In a text: comments, strings and quoted names stay as they are; what FROM, JOIN and INTO name, and values, are written by the engine.
_PARTS = re.compile(
    r"--[^\n]*|'[^']*'|`[^`]*`|\b(?P<before>FROM|JOIN|INTO) (?P<table>[a-z_]+)|(?<![:\w]):(?P<value>[a-z_][a-z_0-9]*)"
)
_SUBQUERY = re.compile(r"\b([a-z_]+) AS \(")


class Query(NamedTuple):
    """A text of SQL for a warehouse, and the values of its :markers, as texts."""

    text: str
    values: Mapping[str, str | None]


# Runs a query on a warehouse. The values of its rows are texts, as in the statement execution API.
Execute = Callable[[Query], Sequence[Mapping[str, "str | None"]]]


@cache
def read_question(name: str) -> str:
    """Returns the text of a question. Raises FileNotFoundError if there is none."""
    return files(__name__).joinpath(f"{name}.sql").read_text(encoding="utf-8")


@cache
def is_question(name: str) -> bool:
    """Returns whether a question has this name."""
    return files(__name__).joinpath(f"{name}.sql").is_file()


def write_question(
    name: str, write_table: Callable[[str], str], write_value: Callable[[str], str] = lambda name: f":{name}"
) -> str:
    """Returns a question's text, with the questions that it names as subqueries.

    Args:
        name: The question.
        write_table: Returns the SQL for a table, from its name.
        write_value: Returns the SQL for a value, from its name. By default the marker stays.
    """
    return write_text(read_question(name), write_table, write_value)


def write_text(
    text: str, write_table: Callable[[str], str], write_value: Callable[[str], str], given: Container[str] = ()
) -> str:
    """Returns a text in the form of a question, with tables and values written; see `write_question`.

    What `given` names is written by `write_table`, even if a question has the same name.
    """
    subqueries = set(_SUBQUERY.findall(text))

    def write(part: re.Match[str]) -> str:
        table, value = part["table"], part["value"]
        if value:
            return write_value(value)
        if not table or table in subqueries:
            return part[0]
        if table in given or not is_question(table):
            return f"{part['before']} {write_table(table)}"
        return f"{part['before']} (\n{write_text(read_question(table), write_table, write_value, given)})"

    return _PARTS.sub(write, text)


def write_view(name: str, write_table: Callable[[str], str]) -> str:
    """Returns the query of a view: the question without restrictions, about the last 90 days."""
    text = write_question(name, write_table, lambda value: _VIEW_VALUES.get(value, "NULL"))
    # Catalogs do not keep comments before a view's query.
    return re.sub(r"\A(--[^\n]*\n)+", "", text).strip()

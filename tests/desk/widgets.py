"""Finds the widgets of a desk as a browser's test does, by their stable names."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any


def walk(widget: Any) -> list[Any]:
    """Lists a widget and all that it holds, in the order in which Tab reaches them."""
    return [widget, *(each for child in getattr(widget, "children", ()) for each in walk(child))]


def find_all(desk: Any, name: str) -> list[Any]:
    """Lists the widgets of a desk with a class such as lookback-publish."""
    return [each for each in walk(desk.widget) if f"lookback-{name}" in each._dom_classes]


def find(desk: Any, name: str) -> Any:
    """Finds the one widget of a desk with a class."""
    (found,) = find_all(desk, name)
    return found


def field(desk: Any, place: str) -> Any:
    """Finds the control of a field of the form, such as `rule-id`."""
    return find(desk, f"field-{place}").children[0]


class TableReader(HTMLParser):
    """Reads the rows of a table, and counts all tags."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.add(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_data(self, data: str) -> None:
        if self.rows:
            self.rows[-1][-1] += data


def read_rows(markup: str) -> list[list[str]]:
    """Reads the cells of a table as a browser does, its titles first."""
    reader = TableReader()
    reader.feed(markup)
    return reader.rows

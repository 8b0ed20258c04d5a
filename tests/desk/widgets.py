"""Finds the widgets of a desk as a browser's test does, by their stable names."""

from __future__ import annotations

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

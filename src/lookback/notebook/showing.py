"""Shows sentences, frames and desks in a cell."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, TypeVar

import pandas as pd

from lookback.views.display import has_person, show, text

_Desk = TypeVar("_Desk")


def say(line: str) -> None:
    """Shows a sentence."""
    show(text(line))


def show_frame(frame: pd.DataFrame, empty: str, *before: Any) -> pd.DataFrame:
    """Shows `before`, and the frame, or a sentence if it is empty. Returns the frame."""
    show(*before, frame if len(frame) else text(empty))
    return frame


def show_desk(module: str, make: Callable[[Any], _Desk], wanted: bool) -> _Desk | None:
    """Shows the desk that `make` makes with a module of `lookback.desk`, and returns it.

    Shows why there is none, and returns None, if `wanted` is false, the notebook runs non-interactively, or ipywidgets
    is missing.
    """
    if not (wanted and has_person()):
        say("No desk: the notebook runs non-interactively, or the parameter desk is false.")
        return None
    try:
        desk = make(importlib.import_module(f"lookback.desk.{module}"))
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("ipywidgets"):
            raise
        say("The desk needs the package ipywidgets, which is not installed; the cells below work without it.")
        return None
    shown: Any = desk
    show(shown.widget)
    return desk

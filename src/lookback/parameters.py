"""Parameters of a notebook: from its own cell, from what a runner put after that cell, from widgets, from the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from lookback.core.errors import SetupError

Value = str | int | float | bool  # of a parameter
_PREFIX = "LOOKBACK_PARAM_"
_TRUTH = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False, "": False}


def parameters(names: Mapping[str, object], **choices: Sequence[str]) -> SimpleNamespace:
    """The notebook's parameters as attributes: each text, number and boolean among its own `names`, which are `globals()`.

    On Databricks each gets a widget, which jobs and people set: a list where its values are one, else a text. Elsewhere the
    values are those of the cell tagged `parameters`, unless the environment has LOOKBACK_PARAM_<NAME>.
    choices: the values of a parameter by its name; those of booleans and of `stream` are known.
    Raises SetupError where a text does not fit the type.
    """
    defaults = {name: value for name, value in names.items() if isinstance(value, Value) and not name.startswith("_")}
    widgets = _widgets()
    values: dict[str, Value] = {}
    for name, default in defaults.items():
        given: str | None = os.environ.get(_PREFIX + name.upper())
        if widgets is not None:
            text = str(default).lower() if isinstance(default, bool) else str(default)
            known = choices.get(name) or _choices(name, default, values)
            # A list without the default would be refused.
            if text in known:
                widgets.dropdown(name, text, list(known))
            else:
                widgets.text(name, text)
            given = widgets.get(name)
        values[name] = default if given is None else _parsed(name, given, default)
    return SimpleNamespace(**values)


def known_mode(mode: str, *known: str) -> str:
    """The parameter `mode`, one of those that are known. Raises SetupError."""
    if mode not in known:
        raise SetupError(f"mode is {', '.join(known[:-1])} or {known[-1]}, got {mode!r}")
    return mode


def _choices(name: str, default: Value, before: Mapping[str, Value]) -> list[str]:
    """The values that a parameter of any notebook can have; none where it can be any text."""
    if isinstance(default, bool):
        return ["false", "true"]
    if name != "stream":
        return []
    streams = sorted(path.stem for path in (Path(str(before.get("conf", ""))) / "streams").glob("*.y*ml"))
    return streams if default else ["", *streams]


def _widgets() -> Any:
    """The widgets of Databricks, from the notebook's own names; None elsewhere."""
    try:
        from IPython.core.getipython import get_ipython
    except ImportError:
        return None
    shell = get_ipython()  # type: ignore[no-untyped-call]
    dbutils = None if shell is None else shell.user_ns.get("dbutils")
    return None if dbutils is None else dbutils.widgets


def _parsed(name: str, given: str, default: Value) -> Value:
    try:
        if isinstance(default, bool):
            return _TRUTH[given.strip().lower()]
        return given if isinstance(default, str) else type(default)(given.strip() or 0)
    except (KeyError, ValueError):
        kind = {bool: "true or false", int: "a whole number", float: "a number"}[type(default)]
        raise SetupError(f"parameter {name} must be {kind}, got {given!r}") from None

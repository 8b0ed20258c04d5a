"""Parameters of a notebook: from its own cell, from what a runner put after that cell, from widgets, from the environment."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

from lookback.core.errors import SetupError

Value = str | int | float | bool  # of a parameter
_PREFIX = "LOOKBACK_PARAM_"
_TRUTH = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False, "": False}


def parameters(**defaults: Value) -> SimpleNamespace:
    """The notebook's parameters as attributes, each of the type of its default in `defaults`.

    On Databricks a text widget per parameter is made and read, so that jobs and people can set it. Elsewhere the values
    are as given by the cell tagged `parameters`, unless the environment has LOOKBACK_PARAM_<NAME>.
    Raises SetupError where a text does not fit the type.
    """
    widgets = _widgets()
    values: dict[str, Value] = {}
    for name, default in defaults.items():
        given: str | None = os.environ.get(_PREFIX + name.upper())
        if widgets is not None:
            widgets.text(name, str(default).lower() if isinstance(default, bool) else str(default))
            given = widgets.get(name)
        values[name] = default if given is None else _parsed(name, given, default)
    return SimpleNamespace(**values)


def known_mode(mode: str, *known: str) -> str:
    """The parameter `mode`, one of those that are known. Raises SetupError."""
    if mode not in known:
        raise SetupError(f"mode is {', '.join(known[:-1])} or {known[-1]}, got {mode!r}")
    return mode


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

"""Reads the parameters of a notebook from its parameter cell, widgets or the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from lookback.core.errors import SetupError

# The types of a parameter.
Value = str | int | float | bool
_VARIABLE_PREFIX = "LOOKBACK_PARAM_"
_BOOLEANS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False, "": False}


def parameters(
    names: Mapping[str, object], also: Mapping[str, Value] | None = None, **choices: Sequence[str]
) -> SimpleNamespace:
    """Returns the notebook's parameters as attributes.

    On Databricks each parameter gets a widget, which you or a job can set: a dropdown if its values are known, else a
    text field. Elsewhere the values come from the cell tagged `parameters`, unless the environment has
    LOOKBACK_PARAM_<NAME>.

    Args:
        names: The notebook's `globals()`; each text, number and boolean in it is a parameter.
        also: Further parameters with their defaults, for jobs and CI: they get no widget and are in no cell.
        **choices: Allowed values by parameter. Booleans and `stream` need none.

    Raises:
        SetupError: If a text does not fit the parameter's type.
    """
    defaults = {name: value for name, value in names.items() if isinstance(value, Value) and not name.startswith("_")}
    widgets = _find_widgets()
    values: dict[str, Value] = {}
    for name, default in defaults.items():
        text_value: str | None = os.environ.get(_VARIABLE_PREFIX + name.upper())
        if widgets is not None:
            text = str(default).lower() if isinstance(default, bool) else str(default)
            known = choices.get(name) or _find_choices(name, default, values)
            # Databricks rejects a dropdown whose default is not among its values.
            if text in known:
                widgets.dropdown(name, text, list(known))
            else:
                widgets.text(name, text)
            text_value = widgets.get(name)
        values[name] = default if text_value is None else _parse(name, text_value, default)
    for name, default in (also or {}).items():
        if name not in values:
            given = os.environ.get(_VARIABLE_PREFIX + name.upper()) if widgets is None else _find_value(widgets, name)
            values[name] = default if given is None else _parse(name, given, default)
    return SimpleNamespace(**values)


def check_mode(mode: str, *known: str) -> str:
    """Returns the parameter `mode`. Raises SetupError if it is unknown."""
    if mode not in known:
        raise SetupError(f"mode is {', '.join(known[:-1])} or {known[-1]}, got {mode!r}")
    return mode


def _find_choices(name: str, default: Value, before: Mapping[str, Value]) -> list[str]:
    """Returns the values that a parameter can have in every notebook; an empty list if any text is allowed."""
    if isinstance(default, bool):
        return ["false", "true"]
    if name != "stream":
        return []
    streams = sorted(path.stem for path in (Path(str(before.get("conf", ""))) / "streams").glob("*.y*ml"))
    return streams if default else ["", *streams]


def _find_value(widgets: Any, name: str) -> str | None:
    """Returns the value that a job gave to a parameter without a widget; None if it gave none."""
    try:
        return str(widgets.get(name))
    except Exception:  # noqa: BLE001 - Databricks raises an error of Java
        return None


def _find_widgets() -> Any:
    """Returns the widgets of Databricks from the notebook's namespace; None elsewhere."""
    try:
        from IPython.core.getipython import get_ipython
    except ImportError:
        return None
    shell = get_ipython()  # type: ignore[no-untyped-call]
    dbutils = None if shell is None else shell.user_ns.get("dbutils")
    return None if dbutils is None else dbutils.widgets


def _parse(name: str, text: str, default: Value) -> Value:
    try:
        if isinstance(default, bool):
            return _BOOLEANS[text.strip().lower()]
        return text if isinstance(default, str) else type(default)(text.strip() or 0)
    except (KeyError, ValueError):
        kind = {bool: "true or false", int: "a whole number", float: "a number"}[type(default)]
        raise SetupError(f"parameter {name} must be {kind}, got {text!r}") from None
